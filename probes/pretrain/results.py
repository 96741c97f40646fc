"""The paper's claims about models pretrained with AdaRoPE, tested on small models trained from random weights.

The samples are seeds, because trainings differ more than the heads of one: a statistic is computed for each seed, and
the whole 95 % confidence interval of its mean over seeds must be on one side of the threshold. One or two seeds decide
nothing. The thresholds are ours; they were fixed before the first training was evaluated.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.results.questions import questions
from headscope.results.result import Bound, Result, Scalar
from headscope.results.samples import mean_result
from headscope.results.verdicts import judge, judge_by_parts
from headscope.runs.aggregation import mean_losses, mean_with_interval, rank_correlations, without_samples
from headscope.runs.run import Run
from probes.pretrain.declaration import TrainingKey

LossesByTraining = dict[TrainingKey, pd.Series]
"""Mean loss (nats/token) of each document under each training."""


def checkpoint_labels(run: Run) -> dict[TrainingKey, dict[int, str]]:
    """The run's checkpoints of each training, as trained: step -> label, in the order of the run.

    A checkpoint under another position scheme than its own is another model. Of several trainings of one variant and
    seed, which combined runs may have, it is the longest, or the first of these.
    """
    return {training: max(folders.values(), key=max) for training, folders in _checkpoints_by_folder(run).items()}


def repeated_trainings(run: Run) -> Iterator[tuple[TrainingKey, str, str]]:
    """Every training that `checkpoint_labels` leaves out: its variant and seed, and the label of the last checkpoint of
    the one that it has instead and of this one."""
    chosen = checkpoint_labels(run)
    for training, folders in _checkpoints_by_folder(run).items():
        for steps in folders.values():
            if steps != chosen[training]:
                yield training, chosen[training][max(chosen[training])], steps[max(steps)]


def _checkpoints_by_folder(run: Run) -> dict[TrainingKey, dict[str, dict[int, str]]]:
    """Step and label of every checkpoint under its own position scheme, by training and folder."""
    labels: dict[TrainingKey, dict[str, dict[int, str]]] = {}
    for model in run.manifest["models"]:
        has_own_scheme = not str(model.get("spec", "")).endswith(f"@{model.get('scheme')}")
        if model.get("pretraining") is not None and model["step"] is not None and has_own_scheme:
            training = TrainingKey(model["pretraining"]["variant"], model["pretraining"]["seed"])
            folder = str(PurePath(str(model.get("checkpoint", ""))).parent)
            labels.setdefault(training, {}).setdefault(folder, {})[model["step"]] = model["label"]
    return labels


def final_checkpoint_labels(run: Run) -> dict[TrainingKey, str]:
    """The label of each training's last checkpoint; only trainings that reached the highest step of the run."""
    labels = checkpoint_labels(run)
    end = max((max(steps) for steps in labels.values()), default=0)
    return {training: steps[end] for training, steps in labels.items() if end in steps}


def native_context(run: Run, label: str) -> int:
    """The context length in tokens that a model was trained on."""
    entry: Mapping[str, Any] = next(model for model in run.manifest["models"] if model["label"] == label)
    return int(entry["geometry"].get("native_context", 0))


def losses_by_document(run: Run, final_labels: Mapping[TrainingKey, str], length: int) -> LossesByTraining:
    """The losses of the final models at one context length."""
    rows = run.nll[run.nll["context_length"] == length].astype({"model": "str", "doc": "str", "nll": "float64"})
    by_label = mean_losses(rows, ["model", "doc"]).groupby("model")
    means = {str(label): losses.droplevel("model") for label, losses in by_label}
    return {training: means[label] for training, label in final_labels.items() if label in means}


def variant_table(run: Run, final_labels: Mapping[TrainingKey, str]) -> pd.DataFrame:
    """One row per variant, with its seeds and, for each context length L, means over documents and their intervals.

    `nll_<L>` is the loss of the final models (nats/token), `nll_<L>_diff` its difference from the first variant with
    the same seed, and `seeds_apart` the range of the seeds' losses at the trained length.
    """
    names = [*dict.fromkeys(training.variant for training in final_labels)]
    by_variant = {name: [training for training in final_labels if training.variant == name] for name in names}
    seeds = {name: ", ".join(str(training.seed) for training in trainings) for name, trainings in by_variant.items()}
    loss_columns: list[pd.DataFrame | pd.Series] = [pd.Series(seeds, name="seeds")]
    difference_columns: list[pd.DataFrame | pd.Series] = []
    trained_length = native_context(run, next(iter(final_labels.values())))
    for length in sorted(run.nll["context_length"].unique()):
        losses = losses_by_document(run, final_labels, int(length))
        values = {name: _document_losses(losses, trainings) for name, trainings in by_variant.items()}
        loss_columns.append(_mean_over_seeds(f"nll_{length}", values))
        differences = {
            name: _paired_differences(losses, trainings, names[0])
            for name, trainings in by_variant.items()
            if name != names[0]
        }
        difference_columns.append(_mean_over_seeds(f"nll_{length}_diff", differences))
        if length == trained_length and len(final_labels) > len(names):
            spreads = {name: _seed_spread(losses_by_seed) for name, losses_by_seed in values.items()}
            difference_columns.append(pd.Series(spreads, name="seeds_apart"))
    return pd.concat([*loss_columns, *difference_columns], axis=1).rename_axis("variant").reset_index()


def _document_losses(losses: LossesByTraining, trainings: Sequence[TrainingKey]) -> list[pd.Series]:
    return [losses[training] for training in trainings if training in losses]


def _paired_differences(losses: LossesByTraining, trainings: Sequence[TrainingKey], reference: str) -> list[pd.Series]:
    """Differences from the reference variant with the same seed, document by document."""
    pairs = [(training, TrainingKey(reference, training.seed)) for training in trainings]
    return [losses[training] - losses[other] for training, other in pairs if training in losses and other in losses]


def _mean_over_seeds(name: str, values: Mapping[str, list[pd.Series]]) -> pd.DataFrame:
    """By variant, the mean over documents of the mean over seeds, with its interval."""
    means = {
        variant: pd.concat(by_seed, axis=1).dropna().mean(axis=1) for variant, by_seed in values.items() if by_seed
    }
    if not means:
        return pd.DataFrame(columns=[name])
    return without_samples(mean_with_interval(pd.concat(means, names=["model"]), name))


def _seed_spread(losses_by_seed: list[pd.Series]) -> float:
    """Range of the seeds' mean losses over the same documents (nats/token); NaN for a single seed."""
    means = pd.concat(losses_by_seed, axis=1).dropna().mean()
    return float(means.max() - means.min()) if len(means) > 1 else float("nan")


MIN_COV_DIFFERENCE = 0.05
"""Smallest difference of two CoV that counts, as a fraction of the median."""
MIN_SPREAD_RATIO = 1.2
MIN_RANK_CORRELATION = 0.3
MIN_USAGE_CORRELATION = 0.8
FIRST_LAYER_MARGIN, MAX_LATER_GAMMA = 0.05, 0.2
DEFAULT_SEED_NOISE = 0.042
"""Difference of two RoPE seeds (nats/token, from-scratch-seeds.yaml), for runs without two RoPE seeds."""
ABLATIONS = {
    "shared-freq": "shared frequencies (shared-freq)",
    "no-scale": "fixed temperature and growth (no-scale)",
    "fixed-log": "fixed logarithmic scaling (fixed-log)",
    "learned-base": "a learned base (learned-base)",
}
"""Ablations of the paper, with their names; `no-freq` is not one of them."""
UNDEFINED_RATIO = "spread over heads in one of the two schemes, so that their ratio is undefined"
OTHER_SCHEMES = ("rope", "prope", "alibi", "nope")

FloatArray = npt.NDArray[np.float64]
HeadsByVariant = Mapping[str, pd.DataFrame]
"""Variant -> the rows of its heads, for one seed."""


def results(run: Run) -> Iterator[Result]:
    """Trainings that are there twice, and the claims that the run's tables can test; none without AdaRoPE."""
    finals = final_checkpoint_labels(run)
    if "adarope" not in {training.variant for training in finals}:
        return
    for training, chosen, other in repeated_trainings(run):
        where: dict[str, Scalar] = {"variant": training.variant, "training_seed": training.seed}
        yield Result(question="pretrain.repeated", model=other, where=where, details={"chosen": chosen})
    heads = run.heads.astype({"model": "str"})
    if not heads.empty:
        yield from _head_claims(heads, finals, native_context(run, next(iter(finals.values()))))
    if "nll" in run.tables:
        yield from _loss_claims(run, finals)


@dataclass(frozen=True)
class Statistic:
    """One number of a seed's models, and the side of a threshold on which the paper's claim puts it."""

    question: str
    bound: Bound
    value: float
    other: str = ""
    """The variant that AdaRoPE is compared with."""
    is_ratio: bool = False
    """Whether its mean over seeds is that of logarithms."""


def _head_claims(heads: pd.DataFrame, final_labels: dict[TrainingKey, str], trained_length: int) -> Iterator[Result]:
    by_seed: dict[int, dict[str, pd.DataFrame]] = {
        seed: {} for seed in sorted({training.seed for training in final_labels})
    }
    by_label = dict([*heads.groupby("model")])
    for training, label in final_labels.items():
        if label in by_label:
            by_seed[training.seed][training.variant] = by_label[label]
    for name, statistics_of_seed in (
        ("cov", _cov_statistics),
        ("effective_base", _base_statistics),
        ("gamma", _gamma_statistics),
        ("lengths", lambda models: _length_statistics(models, f"ess2_{trained_length}")),
        ("used_frequencies", _frequency_statistics),
    ):
        of_claim: dict[tuple[str, str], dict[int, Statistic]] = {}
        for seed, models in by_seed.items():
            for statistic in statistics_of_seed(models):
                of_claim.setdefault((statistic.question, statistic.other), {})[seed] = statistic
        if of_claim:
            yield _claim_over_seeds(f"pretrain.claim.{name}", of_claim.values())


def _claim_over_seeds(question: str, statistics: Collection[Mapping[int, Statistic]]) -> Result:
    """The verdict on a claim about statistics by seed. Statistics that are NaN for a seed are left out, and the claim
    is then not supported or inconclusive."""
    measured = [
        by_seed for by_seed in statistics if not any(math.isnan(statistic.value) for statistic in by_seed.values())
    ]
    claim = judge_by_parts(Result(question=question), map(_judged_over_seeds, measured))
    if len(measured) == len(statistics) or claim.verdict == "not supported":
        return claim
    return replace(claim, verdict="inconclusive", reason="unmeasured", details={"unmeasured": UNDEFINED_RATIO})


def _judged_over_seeds(by_seed: Mapping[int, Statistic]) -> Result:
    """The verdict on the mean of a statistic over seeds."""
    first = next(iter(by_seed.values()))
    values = pd.Series({f"seed {seed}": statistic.value for seed, statistic in by_seed.items()})
    limits = questions()[first.question].limits
    part = mean_result(first.question, values.map(math.log) if first.is_ratio else values, limits)
    if first.is_ratio:
        part = replace(part, value=math.exp(part.value), low=math.exp(part.low), high=math.exp(part.high))
    where = {"other": first.other} if first.other else {}
    return judge(replace(part, where=where, details={"by_seed": values.to_dict()}), first.bound)


def _has_columns(models: HeadsByVariant, variants: Sequence[str], *columns: str) -> bool:
    return all(name in models and all(column in models[name] for column in columns) for name in variants)


def _cov_statistics(models: HeadsByVariant) -> Iterator[Statistic]:
    if not _has_columns(models, ("adarope", "rope", "prope"), "cov"):
        return
    medians = {name: float(np.median(_finite_values(heads, "cov"))) for name, heads in models.items() if "cov" in heads}
    for name in ("rope", "prope"):
        difference = medians["adarope"] / medians[name] - 1
        yield Statistic("pretrain.cov_difference", Bound("below", -MIN_COV_DIFFERENCE), difference, name)


def _base_statistics(models: HeadsByVariant) -> Iterator[Statistic]:
    if not _has_columns(models, ("adarope",), "effective_base"):
        return
    groups = models["adarope"].drop_duplicates(["layer", "kv_group"])
    groups = groups[np.isfinite(groups["effective_base"].astype("float64"))]
    correlation = float(rank_correlations(groups[["layer", "effective_base"]].to_numpy(np.float64).T))
    yield Statistic("pretrain.base_by_depth", Bound("above", MIN_RANK_CORRELATION), correlation)


def _gamma_statistics(models: HeadsByVariant) -> Iterator[Statistic]:
    if not _has_columns(models, ("adarope",), "gamma"):
        return
    first, *later = models["adarope"].astype({"gamma": "float64"}).groupby("layer")["gamma"].mean()
    if not later:
        return
    yield Statistic("pretrain.first_layer_gamma", Bound("above", FIRST_LAYER_MARGIN), first - max(later))
    yield Statistic("pretrain.lowest_gamma", Bound("above"), min(later))
    yield Statistic("pretrain.highest_gamma", Bound("below", MAX_LATER_GAMMA), max(later))


def _length_statistics(models: HeadsByVariant, column: str) -> Iterator[Statistic]:
    if not (_has_columns(models, ("adarope", "rope"), column) and "gamma" in models["adarope"]):
        return
    yield _spread_statistic("pretrain.length_range", models, column, lambda values: np.divide(*_tails(values)))
    both = models["adarope"][["gamma", column]].to_numpy(np.float64).T
    bound = Bound("below", -MIN_RANK_CORRELATION)
    yield Statistic("pretrain.gamma_by_length", bound, float(rank_correlations(both)))


def _tails(values: FloatArray) -> FloatArray:
    """The 90th and the 10th percentile."""
    return np.asarray(np.quantile(values, [0.9, 0.1]))


def _spread_statistic(
    question: str, models: HeadsByVariant, column: str, spread: Callable[[FloatArray], float]
) -> Statistic:
    """A ratio of spreads, AdaRoPE to RoPE; NaN if one of them is 0."""
    adarope, rope = (spread(_finite_values(models[name], column)) for name in ("adarope", "rope"))
    ratio = float(adarope / rope) if adarope and rope else math.nan
    return Statistic(question, Bound("above", MIN_SPREAD_RATIO), ratio, "rope", is_ratio=True)


def _frequency_statistics(models: HeadsByVariant) -> Iterator[Statistic]:
    if not _has_columns(models, ("adarope", "rope"), "weighted_log_theta", "mean_log_theta"):
        return
    yield _spread_statistic(
        "pretrain.frequency_spread", models, "weighted_log_theta", lambda values: float(values.std())
    )
    used, learned = (_finite_values(models["adarope"], name) for name in ("weighted_log_theta", "mean_log_theta"))
    correlation = float(np.corrcoef(learned, used)[0, 1]) if learned.std() * used.std() else 0.0
    yield Statistic("pretrain.used_by_learned", Bound("above", MIN_USAGE_CORRELATION), correlation)


def _loss_claims(run: Run, final_labels: dict[TrainingKey, str]) -> Iterator[Result]:
    """Claims about the validation loss at the trained length: AdaRoPE against its ablations and the other schemes."""
    length = native_context(run, next(iter(final_labels.values())))
    by_training = losses_by_document(run, final_labels, length)
    variants = {training.variant for training in by_training}
    margin, source = _margin(by_training)
    details = {
        "margin": margin,
        "noise_source": source,
        "tested": [name for variant, name in ABLATIONS.items() if variant in variants],
    }
    where = {"context_length": length}
    untested = {"untested": [*{"no-freq"} & variants]}
    for question, compared, further_details in (
        ("pretrain.claim.ablations", [*ABLATIONS], untested),
        ("pretrain.claim.schemes", OTHER_SCHEMES, {}),
    ):
        if parts := [*_loss_gaps(by_training, compared, length, Bound("above", margin))]:
            yield judge_by_parts(Result(question=question, where=where, details={**details, **further_details}), parts)


def _margin(by_training: LossesByTraining) -> tuple[float, str]:
    """Twice the range of the validation losses of RoPE's seeds (nats/token), and where that range is from."""
    losses = [float(losses.mean()) for training, losses in by_training.items() if training.variant == "rope"]
    if len(losses) > 1:
        return 2 * (max(losses) - min(losses)), "the range over this run's RoPE seeds"
    return 2 * DEFAULT_SEED_NOISE, "the difference between the two RoPE seeds of the run from-scratch-seeds"


def _loss_gaps(by_training: LossesByTraining, variants: Collection[str], length: int, bound: Bound) -> Iterator[Result]:
    """Whether each of these variants has a higher loss than AdaRoPE: the mean over seeds, each over the same documents
    and with the same seed under both."""
    for variant in variants:
        gaps = {
            f"seed {training.seed}": float((losses - by_training[adarope]).dropna().mean())
            for training, losses in by_training.items()
            if training.variant == variant and (adarope := TrainingKey("adarope", training.seed)) in by_training
        }
        if gaps:
            where = {"context_length": length, "other": variant}
            yield judge(
                mean_result("pretrain.loss_gap", pd.Series(gaps), where=where, details={"by_seed": gaps}), bound
            )


def _finite_values(heads: pd.DataFrame, column: str) -> FloatArray:
    values: FloatArray = heads[column].to_numpy(dtype=np.float64)
    finite: FloatArray = values[np.isfinite(values)]
    return finite


def next_steps(run: Run) -> Iterator[str]:
    """Commands that measure the checkpoints of each training, and the last ones of all."""
    trainings = sorted((run.path / "checkpoints").glob("*"))
    for training in trainings:
        yield f"Measure every checkpoint of {training.name}: headscope run --checkpoints '{training}/step-*'"
    if len(trainings) > 1:
        last = {training: max(training.glob("step-*")) for training in trainings}
        models = " ".join(f"--model {training.name}={folder}" for training, folder in last.items())
        yield f"Compare the last checkpoints: headscope run {models}"
