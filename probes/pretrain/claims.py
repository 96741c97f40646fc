"""The paper's claims about models pretrained with AdaRoPE, tested on small models trained from random weights.

Each claim is judged separately for every seed that has the models it needs: the whole 95 % confidence interval must
be on one side of the threshold (`runs.aggregation`). The verdict is "supported" or "not supported" if all seeds
agree, else "inconclusive". The thresholds are ours; they were fixed before the first training was evaluated, and the
statements name them. Intervals are percentile bootstraps over heads, resampled separately for each model; those of
losses are over documents.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.report.blocks import PaperClaim
from headscope.runs.aggregation import (
    confidence_interval,
    rank_correlations,
    statistic_interval,
    verdict_above,
    verdict_below,
    verdict_of_parts,
)
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
VerdictAndEvidence = tuple[str, str]
"""A verdict and its evidence."""
HeadsByVariant = dict[str, pd.DataFrame]
"""Variant -> the rows of its heads, for one seed."""


def pretraining_claims(run: Run) -> Iterator[PaperClaim]:
    """The claims that the run's tables can test; none without a model pretrained with AdaRoPE."""
    finals = final_checkpoint_labels(run)
    if "adarope" not in {training.variant for training in finals}:
        return
    heads = run.heads.astype({"model": "str"})
    if not heads.empty:
        yield from _head_claims(heads, finals, native_context(run, next(iter(finals.values()))))
    if "nll" in run.tables:
        yield from _loss_claims(run, finals)


def _head_claims(
    heads: pd.DataFrame, final_labels: dict[TrainingKey, str], trained_length: int
) -> Iterator[PaperClaim]:
    by_seed: dict[int, HeadsByVariant] = {seed: {} for seed in sorted({training.seed for training in final_labels})}
    for training, label in final_labels.items():
        by_seed[training.seed][training.variant] = heads[heads["model"] == label]
    for statement, assess_models in (
        (
            "AdaRoPE uses the rotary pairs more evenly than RoPE and partial RoPE (our criterion: its CoV is at least "
            "5 % lower)",
            _assess_cov,
        ),
        (
            "The effective base grows with depth (our criterion: the rank correlation is above 0.3)",
            _assess_effective_base,
        ),
        (
            "Gamma is largest in the first layer (our criterion: by at least 0.05) and between 0 and 0.2 in the other "
            "layers",
            _assess_gamma_by_layer,
        ),
        (
            "AdaRoPE has a wider range of effective lengths than RoPE (our criterion: at least 1.2 times as wide), and "
            "gamma falls as the effective length rises (our criterion: the rank correlation is below -0.3)",
            lambda models: _assess_length_range(models, f"ess2_{trained_length}"),
        ),
        (
            "Used frequencies have a wider spread under AdaRoPE than under RoPE (our criterion: at least 1.2 times as "
            "wide) and follow the learned frequencies (our criterion: the correlation r is above 0.8)",
            _assess_used_frequencies,
        ),
    ):
        yield from _claim_over_seeds(statement, by_seed, assess_models)


def _claim_over_seeds(
    statement: str,
    by_seed: dict[int, HeadsByVariant],
    assess_models: Callable[[HeadsByVariant], VerdictAndEvidence | None],
) -> Iterator[PaperClaim]:
    verdicts_by_seed = {
        seed: result for seed, models in by_seed.items() if (result := assess_models(models)) is not None
    }
    if verdicts_by_seed:
        evidence = ". ".join(f"Seed {seed}: {of_seed}" for seed, (_, of_seed) in verdicts_by_seed.items())
        yield PaperClaim(statement, combine_verdicts([verdict for verdict, _ in verdicts_by_seed.values()]), evidence)


def combine_verdicts(verdicts: Sequence[str]) -> str:
    """The verdict over several seeds: the common one if they agree, else inconclusive."""
    return verdicts[0] if len({*verdicts}) == 1 else "inconclusive"


def _has_columns(models: HeadsByVariant, variants: Sequence[str], *columns: str) -> bool:
    return all(name in models and all(column in models[name] for column in columns) for name in variants)


def _assess_cov(models: HeadsByVariant) -> VerdictAndEvidence | None:
    if not _has_columns(models, ("adarope", "rope", "prope"), "cov"):
        return None
    adarope = _finite_values(models["adarope"], "cov")
    evidence, verdicts = [f"the median CoV is {np.median(adarope):.3f} under AdaRoPE"], []
    for name in ("rope", "prope"):
        other = _finite_values(models[name], "cov")
        difference = np.median(adarope) - np.median(other)
        low, high = statistic_interval(lambda a, b: np.median(a, -1) - np.median(b, -1), adarope, other)
        verdicts.append(verdict_below(low, high, -MIN_COV_DIFFERENCE * float(np.median(other))))
        evidence.append(
            f"{np.median(other):.3f} under {name} (difference {difference:+.3f}, 95 % confidence interval {low:+.3f} "
            f"to {high:+.3f})"
        )
    return verdict_of_parts(verdicts), ", ".join(evidence)


def _assess_effective_base(models: HeadsByVariant) -> VerdictAndEvidence | None:
    if not _has_columns(models, ("adarope",), "effective_base"):
        return None
    groups = models["adarope"].drop_duplicates(["layer", "kv_group"])
    groups = groups[np.isfinite(groups["effective_base"].astype("float64"))]
    correlation, low, high = _rank_correlation(groups, "layer", "effective_base")
    by_layer = groups.groupby("layer")["effective_base"].median()
    medians = ", ".join(f"{value:,.0f}" for value in by_layer)
    evidence = (
        f"the rank correlation with depth is {correlation:+.2f}{_format_bounds(low, high, '+.2f')}; the medians by "
        f"layer are {medians}"
    )
    return verdict_above(low, high, MIN_RANK_CORRELATION), evidence


def _assess_gamma_by_layer(models: HeadsByVariant) -> VerdictAndEvidence | None:
    if not _has_columns(models, ("adarope",), "gamma"):
        return None
    layers = [
        rows["gamma"].to_numpy(dtype=np.float64) for _, rows in models["adarope"].groupby("layer")
    ]  # the layers are resampled separately
    leads = statistic_interval(lambda first, *later: first.mean(-1) - np.max([x.mean(-1) for x in later], 0), *layers)
    lowest = statistic_interval(lambda *later: np.min([x.mean(-1) for x in later], 0), *layers[1:])
    highest = statistic_interval(lambda *later: np.max([x.mean(-1) for x in later], 0), *layers[1:])
    evidence = "the mean gamma by layer is " + ", ".join(f"{values.mean():+.3f}" for values in layers)
    evidence += f"; the lead of the first layer has a 95 % confidence interval of {leads[0]:+.3f} to {leads[1]:+.3f}"
    is_first = verdict_above(*leads, FIRST_LAYER_MARGIN)
    is_in_range = [verdict_above(*lowest), verdict_below(*highest, MAX_LATER_GAMMA)]
    return verdict_of_parts([is_first, *is_in_range]), evidence


def _assess_length_range(models: HeadsByVariant, column: str) -> VerdictAndEvidence | None:
    if not (_has_columns(models, ("adarope", "rope"), column) and "gamma" in models["adarope"]):
        return None

    def spread(values: FloatArray) -> FloatArray:
        return np.asarray(np.quantile(values, 0.9, -1) / np.quantile(values, 0.1, -1))

    adarope, rope = (_finite_values(models[name], column) for name in ("adarope", "rope"))
    ratio = float(spread(adarope) / spread(rope))
    low, high = statistic_interval(lambda a, b: spread(a) / spread(b), adarope, rope)
    correlation, correlation_low, correlation_high = _rank_correlation(models["adarope"], "gamma", column)
    evidence = (
        f"the 90 % quantile divided by the 10 % quantile is {spread(adarope):.1f} under AdaRoPE and "
        f"{spread(rope):.1f} under RoPE, a ratio of {ratio:.2f}{_format_bounds(low, high, '.2f')}; the rank "
        f"correlation of gamma with effective length is {correlation:+.2f}"
        f"{_format_bounds(correlation_low, correlation_high, '+.2f')}"
    )
    parts = [
        verdict_above(low, high, MIN_SPREAD_RATIO),
        verdict_below(correlation_low, correlation_high, -MIN_RANK_CORRELATION),
    ]
    return verdict_of_parts(parts), evidence


def _assess_used_frequencies(models: HeadsByVariant) -> VerdictAndEvidence | None:
    if not _has_columns(models, ("adarope", "rope"), "weighted_log_theta", "mean_log_theta"):
        return None
    adarope, rope = (_finite_values(models[name], "weighted_log_theta") for name in ("adarope", "rope"))
    ratio = float(np.std(adarope) / np.std(rope))
    low, high = statistic_interval(lambda a, b: np.std(a, -1) / np.std(b, -1), adarope, rope)
    learned = _finite_values(models["adarope"], "mean_log_theta")
    r = float(np.corrcoef(learned, adarope)[0, 1])
    r_low, r_high = statistic_interval(
        lambda index: _correlations(learned[index], adarope[index]), np.arange(len(learned))
    )
    evidence = (
        f"the standard deviation of the mean ln theta, weighted by usage, is {np.std(adarope):.3f} under AdaRoPE and "
        f"{np.std(rope):.3f} under RoPE, a ratio of {ratio:.2f}{_format_bounds(low, high, '.2f')}; its correlation "
        f"with the learned mean is r = {r:+.2f}{_format_bounds(r_low, r_high, '+.2f')}"
    )
    parts = [verdict_above(low, high, MIN_SPREAD_RATIO), verdict_above(r_low, r_high, MIN_USAGE_CORRELATION)]
    return verdict_of_parts(parts), evidence


def _correlations(x: FloatArray, y: FloatArray) -> FloatArray:
    """Pearson's correlation over the last axis; 0 if one of the two is constant."""
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.asarray((x * y).sum(-1) / np.where(norms > 0, norms, np.inf))


def _loss_claims(run: Run, final_labels: dict[TrainingKey, str]) -> Iterator[PaperClaim]:
    """Claims about the validation loss at the trained length: AdaRoPE against its ablations and the other schemes."""
    length = native_context(run, next(iter(final_labels.values())))
    by_training = losses_by_document(run, final_labels, length)
    noise = _seed_noise(by_training)
    threshold = f"(our criterion: by more than {2 * noise:.3f} nats/token, {_describe_noise(by_training)})"
    variants = {training.variant for training in by_training}
    tested = ", ".join(name for name in ABLATIONS if name in variants)
    statement = f"Each tested ablation of AdaRoPE ({tested}) has a higher loss than AdaRoPE {threshold}"
    statement += "; the paper has no ablation no-freq, so it is not part of this claim" if "no-freq" in variants else ""
    yield from _loss_gap_claim(statement, ABLATIONS, by_training, noise, length)
    names = {scheme: scheme for scheme in OTHER_SCHEMES}
    yield from _loss_gap_claim(
        f"AdaRoPE has a lower loss than every other position scheme {threshold}", names, by_training, noise, length
    )


def _rope_losses(by_training: LossesByTraining) -> list[float]:
    """Validation loss of each of RoPE's seeds (nats/token)."""
    return [float(losses.mean()) for training, losses in by_training.items() if training.variant == "rope"]


def _seed_noise(by_training: LossesByTraining) -> float:
    """Range of the validation losses of RoPE's seeds (nats/token)."""
    losses = _rope_losses(by_training)
    return max(losses) - min(losses) if len(losses) > 1 else DEFAULT_SEED_NOISE


def _describe_noise(by_training: LossesByTraining) -> str:
    if len(_rope_losses(by_training)) > 1:
        return "twice the range over this run's RoPE seeds"
    return "twice the difference between the two RoPE seeds of the run from-scratch-seeds"


def _loss_gap_claim(
    statement: str, variant_names: dict[str, str], by_training: LossesByTraining, noise: float, length: int
) -> Iterator[PaperClaim]:
    """The claim that each of these variants has a higher loss than AdaRoPE with the same seed."""
    verdicts, gaps = [], []
    for training in by_training:
        adarope = TrainingKey("adarope", training.seed)
        if training.variant in variant_names and adarope in by_training:
            gap = (by_training[training] - by_training[adarope]).dropna()
            low, high = confidence_interval(gap.to_numpy(dtype=np.float64)[None])[:, 0]
            verdicts.append(verdict_above(low, high, 2 * noise))
            bounds = _format_bounds(low, high, "+.3f") or " (too few documents for an interval)"
            gaps.append(f"{variant_names[training.variant]} {gap.mean():+.3f}{bounds} with seed {training.seed}")
    if verdicts:
        yield PaperClaim(
            statement,
            verdict_of_parts(verdicts),
            f"Validation losses minus AdaRoPE's, in nats/token, in contexts of {length:,} tokens: {', '.join(gaps)}",
        )


def _format_bounds(low: float, high: float, number_format: str) -> str:
    """A confidence interval in brackets, to follow its value; "" without one."""
    if not np.isfinite(low):
        return ""
    return f" (95 % confidence interval {low:{number_format}} to {high:{number_format}})"


def _finite_values(heads: pd.DataFrame, column: str) -> FloatArray:
    values: FloatArray = heads[column].to_numpy(dtype=np.float64)
    finite: FloatArray = values[np.isfinite(values)]
    return finite


def _rank_correlation(heads: pd.DataFrame, x: str, y: str) -> tuple[float, float, float]:
    """Spearman's rank correlation over heads and the bounds of its interval; 0 if one of the two is constant."""
    both = heads[[x, y]].to_numpy(dtype=np.float64).T
    low, high = statistic_interval(lambda index: rank_correlations(both[:, index]), np.arange(both.shape[1]))
    return float(rank_correlations(both)), low, high
