"""What the paper says of models pretrained with AdaRoPE, claim by claim, against trainings from scratch.

Each claim is judged in every seed that has the models it needs, and holds, or differs, where it does in each; else it
cannot be told at this size. Thresholds are ours, written before the first training was looked at, and stand in each
claim's text. Intervals are 95 % percentile bootstraps over heads, which are drawn anew in each model.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.report.blocks import PaperClaim
from headscope.runs.aggregation import confidence_interval
from headscope.runs.run import Run
from probes.pretrain.analysis import LossesByTraining, losses_by_document
from probes.pretrain.checkpoint_index import TrainingKey, final_checkpoint_labels, native_context

BOOTSTRAP_SAMPLES = 2000
MIN_COV_DIFFERENCE = 0.05
"""Share of a median by which two CoV differ."""
MIN_SPREAD_RATIO = 1.2
MIN_RANK_CORRELATION = 0.3
MIN_USAGE_CORRELATION, CONTRARY_USAGE_CORRELATION = 0.8, 0.4
FIRST_LAYER_MARGIN, MAX_LATER_GAMMA = 0.05, 0.2
DEFAULT_SEED_NOISE = 0.042
"""nats/token that two seeds of RoPE differed by (studies/from-scratch-seeds.yaml), where a run has no two that tell."""
ABLATIONS = {
    "shared-freq": "shared frequencies",
    "no-scale": "no AdaScale",
    "fixed-log": "fixed log scaling",
    "learned-base": "a learned base",
}
"""The paper's ablations that are trained from scratch."""
OTHER_SCHEMES = ("rope", "prope", "alibi", "nope")
INCONCLUSIVE = "cannot be told at this size"

FloatArray = npt.NDArray[np.float64]
Judgement = tuple[str, str]
"""A verdict, and the figures that say so."""
HeadsByVariant = dict[str, pd.DataFrame]
"""Variant -> its heads, of one seed."""


def pretraining_claims(run: Run) -> Iterator[PaperClaim]:
    """The claims that the run's tables can speak to; none without a model that learned its positions from scratch."""
    finals = final_checkpoint_labels(run)
    if "adarope" not in {training.variant for training in finals}:
        return
    heads = run.heads.astype({"model": "str"})
    if not heads.empty:
        seeds = sorted({training.seed for training in finals})
        by_seed = {
            seed: {each.variant: heads[heads["model"] == label] for each, label in finals.items() if each.seed == seed}
            for seed in seeds
        }
        length = native_context(run, next(iter(finals.values())))
        for said, judge in (
            ("AdaRoPE uses the rotary pairs more evenly than RoPE and partial RoPE (CoV lower by 5 %)", _judge_cov),
            ("The effective base grows with depth (rank correlation above 0.3)", _judge_effective_base),
            ("gamma is largest in the first layer (by 0.05), and 0 to 0.2 in the others", _judge_gamma_by_layer),
            (
                "AdaRoPE has a wider range of effective lengths than RoPE (1.2 times), and gamma falls with the mean "
                "effective length (rank correlation below -0.3)",
                lambda models: _judge_length_range(models, f"ess2_{length}"),
            ),
            (
                "Used frequencies spread wider under AdaRoPE than under RoPE (1.2 times), and follow the learned ones "
                "(r above 0.8)",
                _judge_used_frequencies,
            ),
        ):
            yield from _claim_over_seeds(said, by_seed, judge)
    if "nll" in run.tables:
        yield from _loss_claims(run, finals)


def _claim_over_seeds(statement: str, by_seed: dict[int, HeadsByVariant], judge: Callable[[HeadsByVariant], Judgement | None]) -> Iterator[PaperClaim]:
    told = {seed: judged for seed, models in by_seed.items() if (judged := judge(models)) is not None}
    if told:
        figures = "; ".join(f"seed {seed}: {found}" for seed, (_, found) in told.items())
        yield PaperClaim(statement, combine_verdicts([verdict for verdict, _ in told.values()]), figures)


def combine_verdicts(verdicts: Sequence[str]) -> str:
    """The verdict of several seeds: theirs where they agree."""
    return verdicts[0] if len({*verdicts}) == 1 else INCONCLUSIVE


def _judgement(holds: bool, differs: bool, figures: str) -> Judgement:
    return ("holds" if holds else "differs" if differs else INCONCLUSIVE), figures


def _has_columns(models: HeadsByVariant, variants: Sequence[str], *columns: str) -> bool:
    return all(name in models and all(column in models[name] for column in columns) for name in variants)


def _judge_cov(models: HeadsByVariant) -> Judgement | None:
    if not _has_columns(models, ("adarope", "rope", "prope"), "cov"):
        return None
    own = _finite_values(models["adarope"], "cov")
    found, lower, higher = [f"median CoV {np.median(own):.3f}"], [], False
    for name in ("rope", "prope"):
        other = _finite_values(models[name], "cov")
        gap = np.median(own) - np.median(other)
        low, high = _bootstrap_interval(lambda a, b: np.median(a, -1) - np.median(b, -1), own, other)
        lower.append(gap <= -MIN_COV_DIFFERENCE * np.median(other) and high < 0)
        higher = higher or bool(name == "rope" and gap >= MIN_COV_DIFFERENCE * np.median(other))
        found.append(f"{np.median(other):.3f} under {name} ({gap:+.3f} [{low:+.3f}, {high:+.3f}])")
    return _judgement(all(lower), higher, ", ".join(found))


def _judge_effective_base(models: HeadsByVariant) -> Judgement | None:
    if not _has_columns(models, ("adarope",), "effective_base"):
        return None
    groups = models["adarope"].drop_duplicates(["layer", "kv_group"])
    groups = groups[np.isfinite(groups["effective_base"].astype("float64"))]
    rank, low, high = _rank_correlation(groups, "layer", "effective_base")
    by_layer = groups.groupby("layer")["effective_base"].median()
    medians = ", ".join(f"{value:,.0f}" for value in by_layer)
    found = f"rank correlation {rank:+.2f} [{low:+.2f}, {high:+.2f}], median by layer {medians}"
    return _judgement(rank > MIN_RANK_CORRELATION and low > 0, rank < -MIN_RANK_CORRELATION and high < 0, found)


def _judge_gamma_by_layer(models: HeadsByVariant) -> Judgement | None:
    if not _has_columns(models, ("adarope",), "gamma"):
        return None
    by_layer = models["adarope"].astype({"gamma": "float64"}).groupby("layer")["gamma"].mean()
    first, others = by_layer.iloc[0], by_layer.iloc[1:]
    holds = bool(first > others.max() + FIRST_LAYER_MARGIN and others.min() > 0 and others.max() < MAX_LATER_GAMMA)
    differs = bool(first < others.min() or others.mean() < 0)
    return _judgement(holds, differs, "mean gamma by layer " + ", ".join(f"{value:+.3f}" for value in by_layer))


def _judge_length_range(models: HeadsByVariant, column: str) -> Judgement | None:
    if not (_has_columns(models, ("adarope", "rope"), column) and "gamma" in models["adarope"]):
        return None

    def spread(values: FloatArray) -> FloatArray:
        return np.asarray(np.quantile(values, 0.9, -1) / np.quantile(values, 0.1, -1))

    own, other = (_finite_values(models[name], column) for name in ("adarope", "rope"))
    wider = float(spread(own) / spread(other))
    low, high = _bootstrap_interval(lambda a, b: spread(a) / spread(b), own, other)
    rank, least, most = _rank_correlation(models["adarope"], "gamma", column)
    found = (
        f"90 % over 10 % quantile {spread(own):.1f} against {spread(other):.1f}, {wider:.2f} times [{low:.2f}, "
        f"{high:.2f}]; rank correlation of gamma {rank:+.2f} [{least:+.2f}, {most:+.2f}]"
    )
    holds = wider >= MIN_SPREAD_RATIO and rank < -MIN_RANK_CORRELATION and most < 0
    return _judgement(holds, wider <= 1 / MIN_SPREAD_RATIO or (rank > MIN_RANK_CORRELATION and least > 0), found)


def _judge_used_frequencies(models: HeadsByVariant) -> Judgement | None:
    if not _has_columns(models, ("adarope", "rope"), "weighted_log_theta", "mean_log_theta"):
        return None
    own, other = (_finite_values(models[name], "weighted_log_theta") for name in ("adarope", "rope"))
    wider = float(np.std(own) / np.std(other))
    low, high = _bootstrap_interval(lambda a, b: np.std(a, -1) / np.std(b, -1), own, other)
    learned = _finite_values(models["adarope"], "mean_log_theta")
    r = float(np.corrcoef(learned, own)[0, 1])
    found = f"standard deviation {np.std(own):.3f} against {np.std(other):.3f}, {wider:.2f} times "
    found += f"[{low:.2f}, {high:.2f}]; r {r:+.2f}"
    return _judgement(wider >= MIN_SPREAD_RATIO and r > MIN_USAGE_CORRELATION, wider <= 1 or r < CONTRARY_USAGE_CORRELATION, found)


def _loss_claims(run: Run, final_labels: dict[TrainingKey, str]) -> Iterator[PaperClaim]:
    """Held-out loss at the trained length: AdaRoPE against its ablations, and against the other schemes."""
    length = native_context(run, next(iter(final_labels.values())))
    by_doc = losses_by_document(run, final_labels, length)
    noise = _seed_noise(by_doc)
    said = f"(by more than twice {noise:.3f} nats/token, the noise)"
    yield from _loss_gap_claim(f"Each ablation of AdaRoPE predicts worse than AdaRoPE {said}", ABLATIONS, by_doc, noise)
    names = dict.fromkeys(OTHER_SCHEMES, "")
    yield from _loss_gap_claim(f"AdaRoPE predicts better than every other scheme {said}", names, by_doc, noise)


def _seed_noise(by_doc: LossesByTraining) -> float:
    """How far the held-out losses of RoPE's seeds lie apart."""
    seeds = [float(losses.mean()) for training, losses in by_doc.items() if training.variant == "rope"]
    return max(seeds) - min(seeds) if len(seeds) > 1 else DEFAULT_SEED_NOISE


def _loss_gap_claim(statement: str, variant_names: dict[str, str], by_doc: LossesByTraining, noise: float) -> Iterator[PaperClaim]:
    verdicts, figures = [], []
    for training in by_doc:
        own = TrainingKey("adarope", training.seed)
        if training.variant in variant_names and own in by_doc:
            gap = (by_doc[training] - by_doc[own]).dropna()
            low, high = confidence_interval(gap.to_numpy(dtype=np.float64)[None])[:, 0]
            verdict, _ = _judgement(gap.mean() > 2 * noise and low > 0, gap.mean() < -2 * noise and high < 0, "")
            verdicts.append(verdict)
            name = variant_names[training.variant] or training.variant
            bounds = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ", too few documents for an interval"
            figures.append(f"{name} {gap.mean():+.3f}{bounds} (seed {training.seed})")
    if verdicts:
        verdict = "differs" if "differs" in verdicts else combine_verdicts(verdicts)
        yield PaperClaim(statement, verdict, f"loss less AdaRoPE's, nats/token: {', '.join(figures)}")


def _finite_values(heads: pd.DataFrame, column: str) -> FloatArray:
    values: FloatArray = heads[column].to_numpy(dtype=np.float64)
    finite: FloatArray = values[np.isfinite(values)]
    return finite


def _rank_correlation(heads: pd.DataFrame, x: str, y: str) -> tuple[float, float, float]:
    """Spearman's rank correlation over heads, and the ends of its interval; 0 where one of the two is constant."""
    from scipy.stats import rankdata  # takes a second to import

    both = heads[[x, y]].to_numpy(dtype=np.float64).T
    at = np.arange(both.shape[1])

    def rank(drawn: npt.NDArray[np.int64]) -> FloatArray:
        ranks = rankdata(both[:, drawn], axis=-1)
        ranks = ranks - ranks.mean(-1, keepdims=True)
        norms = np.linalg.norm(ranks, axis=-1).prod(0)
        return np.asarray((ranks[0] * ranks[1]).sum(-1) / np.where(norms > 0, norms, np.inf))

    return float(rank(at)), *_bootstrap_interval(rank, at)


def _bootstrap_interval(statistic: Callable[..., FloatArray], *samples: npt.NDArray[Any]) -> tuple[float, float]:
    """95 % interval of a statistic over the last axis of samples, each drawn anew by itself."""
    chance = np.random.default_rng(0)
    drawn = [each[chance.integers(len(each), size=(BOOTSTRAP_SAMPLES, len(each)))] for each in samples]
    low, high = np.nanquantile(statistic(*drawn), [0.025, 0.975])
    return float(low), float(high)
