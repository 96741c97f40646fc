"""The paper's claims about models pretrained with AdaRoPE, tested on small models trained from random weights.

Each claim is judged separately for every seed that has the models it needs: the whole 95 % confidence interval must
be on one side of the threshold. The verdict is "supported" or "not supported" if all seeds agree, else "inconclusive".
The thresholds are ours; they were fixed before the first training was evaluated. Intervals are percentile bootstraps
over heads, resampled separately for each model; those of losses are over documents.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.results.result import Bound, Result
from headscope.results.verdicts import judge, judge_by_agreement, judge_by_parts
from headscope.runs.aggregation import confidence_interval, rank_correlations, statistic_interval
from headscope.runs.run import Run
from probes.pretrain.analysis import (
    LossesByTraining,
    final_checkpoint_labels,
    losses_by_document,
    native_context,
)
from probes.pretrain.schema import TrainingKey

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
OTHER_SCHEMES = ("rope", "prope", "alibi", "nope")

FloatArray = npt.NDArray[np.float64]
HeadsByVariant = Mapping[str, pd.DataFrame]
"""Variant -> the rows of its heads, for one seed."""


def results(run: Run) -> Iterator[Result]:
    """The claims that the run's tables can test; none without a model pretrained with AdaRoPE."""
    finals = final_checkpoint_labels(run)
    if "adarope" not in {training.variant for training in finals}:
        return
    heads = run.heads.astype({"model": "str"})
    if not heads.empty:
        yield from _head_claims(heads, finals, native_context(run, next(iter(finals.values()))))
    if "nll" in run.tables:
        yield from _loss_claims(run, finals)


def _head_claims(heads: pd.DataFrame, final_labels: dict[TrainingKey, str], trained_length: int) -> Iterator[Result]:
    by_seed: dict[int, dict[str, pd.DataFrame]] = {
        seed: {} for seed in sorted({training.seed for training in final_labels})
    }
    for training, label in final_labels.items():
        by_seed[training.seed][training.variant] = heads[heads["model"] == label]
    for name, parts_of_seed in (
        ("cov", _cov_parts),
        ("effective_base", _base_parts),
        ("gamma", _gamma_parts),
        ("lengths", lambda models: _length_parts(models, f"ess2_{trained_length}")),
        ("used_frequencies", _frequency_parts),
    ):
        seeds = []
        for seed, models in by_seed.items():
            if parts := [*parts_of_seed(models)]:
                of_seed = Result(question="pretrain.seed", where={"claim": name, "seed": seed})
                seeds.append(judge_by_parts(of_seed, parts))
        if seeds:
            yield judge_by_agreement(Result(question=f"pretrain.claim.{name}"), seeds)


def _has_columns(models: HeadsByVariant, variants: Sequence[str], *columns: str) -> bool:
    return all(name in models and all(column in models[name] for column in columns) for name in variants)


def _part(
    question: str,
    bound: Bound,
    models: Sequence[pd.DataFrame],
    statistic: Callable[..., Any],
    *samples: npt.NDArray[Any],
    n: int | None = None,
    **details: object,
) -> Result:
    """The verdict on a statistic of the heads of one model, or of a model and its baseline, over resampled `samples`.

    `n` is the number of heads or KV groups, by default those of the first sample.
    """
    low, high = statistic_interval(statistic, *samples)
    labels = [str(heads["model"].iloc[0]) for heads in models]
    part = Result(
        question=question,
        model=labels[0],
        baseline="".join(labels[1:]),
        value=float(statistic(*samples)),
        low=low,
        high=high,
        n=len(samples[0]) if n is None else n,
        details=details,
    )
    return judge(part, bound)


def _cov_parts(models: HeadsByVariant) -> Iterator[Result]:
    if not _has_columns(models, ("adarope", "rope", "prope"), "cov"):
        return
    adarope = _finite_values(models["adarope"], "cov")
    for name in ("rope", "prope"):
        other = _finite_values(models[name], "cov")
        median = float(np.median(other))
        yield _part(
            "pretrain.cov_difference",
            Bound("below", -MIN_COV_DIFFERENCE * median),
            [models["adarope"], models[name]],
            lambda a, b: np.median(a, -1) - np.median(b, -1),
            adarope,
            other,
            median=np.median(adarope),
            baseline_median=median,
        )


def _base_parts(models: HeadsByVariant) -> Iterator[Result]:
    if not _has_columns(models, ("adarope",), "effective_base"):
        return
    groups = models["adarope"].drop_duplicates(["layer", "kv_group"])
    groups = groups[np.isfinite(groups["effective_base"].astype("float64"))]
    medians = _by_layer(groups.groupby("layer")["effective_base"].median())
    yield _correlation_part(
        "pretrain.base_by_depth", Bound("above", MIN_RANK_CORRELATION), groups, "layer", "effective_base", medians
    )


def _by_layer(values: pd.Series) -> dict[str, float]:
    return {f"L{layer}": float(value) for layer, value in values.items()}


def _correlation_part(
    question: str, bound: Bound, heads: pd.DataFrame, x: str, y: str, by_layer: Mapping[str, float] | None = None
) -> Result:
    """The verdict on Spearman's rank correlation over heads or KV groups; 0 if one of the two is constant."""
    both = heads[[x, y]].to_numpy(dtype=np.float64).T
    index = np.arange(both.shape[1])
    return _part(question, bound, [heads], lambda drawn: rank_correlations(both[:, drawn]), index, by_layer=by_layer)


def _gamma_parts(models: HeadsByVariant) -> Iterator[Result]:
    if not _has_columns(models, ("adarope",), "gamma"):
        return
    heads = models["adarope"].astype({"gamma": "float64"})
    layers = [rows["gamma"].to_numpy() for _, rows in heads.groupby("layer")]  # each is resampled separately

    def means(later: Sequence[FloatArray]) -> FloatArray:
        return np.asarray([values.mean(-1) for values in later])

    def part(question: str, bound: Bound, statistic: Callable[..., Any], *samples: FloatArray) -> Result:
        by_layer = _by_layer(heads.groupby("layer")["gamma"].mean())
        return _part(question, bound, [heads], statistic, *samples, n=sum(map(len, samples)), by_layer=by_layer)

    yield part(
        "pretrain.first_layer_gamma",
        Bound("above", FIRST_LAYER_MARGIN),
        lambda first, *later: first.mean(-1) - means(later).max(0),
        *layers,
    )
    yield part("pretrain.lowest_gamma", Bound("above"), lambda *later: means(later).min(0), *layers[1:])
    highest = Bound("below", MAX_LATER_GAMMA)
    yield part("pretrain.highest_gamma", highest, lambda *later: means(later).max(0), *layers[1:])


def _length_parts(models: HeadsByVariant, column: str) -> Iterator[Result]:
    if not (_has_columns(models, ("adarope", "rope"), column) and "gamma" in models["adarope"]):
        return
    yield _spread_part(
        "pretrain.length_range",
        models,
        column,
        lambda values: np.quantile(values, 0.9, -1) / np.quantile(values, 0.1, -1),
    )
    bound = Bound("below", -MIN_RANK_CORRELATION)
    yield _correlation_part("pretrain.gamma_by_length", bound, models["adarope"], "gamma", column)


def _spread_part(question: str, models: HeadsByVariant, column: str, spread: Callable[[FloatArray], Any]) -> Result:
    """The verdict on a ratio of spreads, AdaRoPE to RoPE."""
    adarope, rope = (_finite_values(models[name], column) for name in ("adarope", "rope"))
    return _part(
        question,
        Bound("above", MIN_SPREAD_RATIO),
        [models["adarope"], models["rope"]],
        lambda a, b: spread(a) / spread(b),
        adarope,
        rope,
        spread=spread(adarope),
        baseline_spread=spread(rope),
    )


def _frequency_parts(models: HeadsByVariant) -> Iterator[Result]:
    if not _has_columns(models, ("adarope", "rope"), "weighted_log_theta", "mean_log_theta"):
        return
    yield _spread_part("pretrain.frequency_spread", models, "weighted_log_theta", lambda values: np.std(values, -1))
    used, learned = (_finite_values(models["adarope"], name) for name in ("weighted_log_theta", "mean_log_theta"))
    yield _part(
        "pretrain.used_by_learned",
        Bound("above", MIN_USAGE_CORRELATION),
        [models["adarope"]],
        lambda index: _correlations(learned[index], used[index]),
        np.arange(len(learned)),
    )


def _correlations(x: FloatArray, y: FloatArray) -> FloatArray:
    """Pearson's correlation over the last axis; 0 if one of the two is constant."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.asarray((x * y).sum(-1) / np.where(norms > 0, norms, np.inf))


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
        if parts := [*_loss_gaps(by_training, final_labels, compared, length, Bound("above", margin))]:
            yield judge_by_parts(Result(question=question, where=where, details={**details, **further_details}), parts)


def _margin(by_training: LossesByTraining) -> tuple[float, str]:
    """Twice the range of the validation losses of RoPE's seeds (nats/token), and where that range is from."""
    losses = [float(losses.mean()) for training, losses in by_training.items() if training.variant == "rope"]
    if len(losses) > 1:
        return 2 * (max(losses) - min(losses)), "the range over this run's RoPE seeds"
    return 2 * DEFAULT_SEED_NOISE, "the difference between the two RoPE seeds of the run from-scratch-seeds"


def _loss_gaps(
    by_training: LossesByTraining,
    labels: Mapping[TrainingKey, str],
    variants: Collection[str],
    length: int,
    bound: Bound,
) -> Iterator[Result]:
    """Whether each of these variants has a higher loss than AdaRoPE with the same seed, paired by document."""
    for training in by_training:
        adarope = TrainingKey("adarope", training.seed)
        if training.variant not in variants or adarope not in by_training:
            continue
        gap = (by_training[training] - by_training[adarope]).dropna()
        (low,), (high,) = confidence_interval(gap.to_numpy(dtype=np.float64)[None])
        yield judge(
            Result(
                question="pretrain.loss_gap",
                model=labels[training],
                baseline=labels[adarope],
                value=float(gap.mean()),
                low=low,
                high=high,
                n=len(gap),
                where={"context_length": length},
                by_sample={str(doc): float(value) for doc, value in gap.items()},
            ),
            bound,
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
