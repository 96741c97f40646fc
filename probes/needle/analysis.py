"""Analysis of needle trials: success by cell, retrieval scores by head, KV group, seed and model, ablation curves."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.runs.aggregation import HEAD_KEYS, plain_types
from headscope.runs.run import Run
from probes.needle.heads import RETRIEVAL_THRESHOLD, retrieval_rows

MODE_LABELS = {"strict": "needles", "indirect": "indirect needles", "wu": "needles, as Wu et al. count"}
"""Text for each mode, in display order."""
PUBLISHED_SHARES = {"above": (0.03, 0.06), "zero": (0.45, 0.73)}
"""Shares of heads above 0.1 and of exactly 0 over the models of Wu et al. 2024."""
TOP_COUNT = 10
LISTED_HEADS = 5
"""Heads listed in a finding."""
NORMAL_QUANTILE = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""
DETECTOR_PAIRS = (
    ("retrieval", "needle_write"),
    ("retrieval", "needle_write_indirect"),
    ("needle_write", "needle_write_indirect"),
    ("retrieval_indirect", "needle_write_indirect"),
)
"""Pairs of columns of the per-head table that detect retrieval heads in different ways."""


def present_modes(needles: pd.DataFrame) -> list[str]:
    """The modes of these trials, without controls."""
    present = set(needles["mode"])
    return [mode for mode in MODE_LABELS if mode in present]


def success_by_cell(needles: pd.DataFrame) -> pd.DataFrame:
    """One row per (model, mode, context_length, depth): `trials`, `successes`, their `share` and its 95 % Wilson
    confidence interval `low` .. `high`. Control trials, without the needle, count like the others."""
    groups = needles.groupby(["model", "mode", "context_length", "depth"], observed=True)["success"]
    return _add_wilson_interval(groups.agg(trials="size", successes="sum").reset_index())


def retrieval_summary(run: Run) -> pd.DataFrame:
    """One row per model and mode, without controls.

    `trials`, `successes`, `share`, `low`, `high` as in `success_by_cell`. Over the successful trials, NaN if there are
    none: `above`, the share of heads whose mean score is above 0.1; `zero`, the share at exactly 0; `layer`, `head` and
    `top`, the top head and its score. `control` is the largest mean score of a head in the control.
    """
    trials = run.needles.groupby(["model", "mode"], observed=True)["success"]
    counts = trials.agg(trials="size", successes="sum").reset_index().astype({"model": "str", "mode": "str"})
    counts = _add_wilson_interval(counts[counts["mode"] != CONTROL])
    heads = run.heads.astype({"model": "str"})
    rows = []
    for label, mode in counts[["model", "mode"]].itertuples(index=False):
        block = heads[heads["model"] == label]
        scores = block.get(retrieval_column(mode), pd.Series(np.nan, block.index)).dropna()
        best = block.loc[scores.idxmax()] if len(scores) else None
        rows.append(
            {
                "above": (scores > RETRIEVAL_THRESHOLD).mean(),
                "zero": (scores == 0).mean(),
                "layer": np.nan if best is None else best["layer"],
                "head": np.nan if best is None else best["head"],
                "top": scores.max(),
                "control": block["retrieval_control"].max() if "retrieval_control" in block else np.nan,
            }
        )
    return counts.reset_index(drop=True).join(pd.DataFrame(rows))


def retrieval_column(mode: str) -> str:
    """The column of the per-head table with the scores of a mode."""
    return "retrieval" if mode == "strict" else f"retrieval_{mode}"


def top_heads(run: Run, model: str, mode: str) -> list[tuple[int, int, float]]:
    """Layer, head and score of the heads of a model with the highest scores."""
    order = run.heads[run.heads["model"] == model].sort_values(retrieval_column(mode), ascending=False, kind="stable")
    return [*order[["layer", "head", retrieval_column(mode)]].head(LISTED_HEADS).itertuples(index=False, name=None)]


def detector_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Agreement of detectors: one row per model and pair of `DETECTOR_PAIRS` that it has.

    `spearman` and `overlap` as in `seed_agreement`; `low` .. `high` is the 95 % confidence interval of the correlation
    over heads (Fisher's z with the variance of Bonett and Wright 2000 [ours]); `first`, `second` are the columns.
    """
    rows = []
    for label, block in heads.groupby("model", observed=True):
        for first, second in DETECTOR_PAIRS:
            both = block.reindex(columns=[first, second]).dropna()
            if len(both):
                spearman, overlap = _rank_agreement(both)
                rows.append((str(label), first, second, spearman, *_spearman_interval(spearman, len(both)), overlap))
    return pd.DataFrame(rows, columns=["model", "first", "second", "spearman", "low", "high", "overlap"])


def ablation_curve(run: Run) -> pd.DataFrame:
    """Success with heads ablated: one row per (model, mode, ablation, size, top).

    `top` is True for the top heads and False for random heads; size 0 is the unchanged model. `share` is the share of
    `trials` that succeed, averaged over draws for random heads, with extremes `minimum` and `maximum`. `low` .. `high`
    is the 95 % Wilson confidence interval over the trials of one set, so more draws do not make it narrower.
    """
    keys = ["model", "mode", "ablation", "size"]
    ablated = plain_types(run.table("needle_ablation"))
    sets = ablated.groupby([*keys, "draw"])["success"].agg(["size", "mean"])
    sets = sets.set_axis(["trials", "share"], axis=1).reset_index()
    sets["top"] = sets["draw"] == 0
    shares = sets.groupby([*keys, "top"])["share"]
    curve = sets.groupby([*keys, "top"]).agg(trials=("trials", "first"), share=("share", "mean"))
    curve = curve.assign(minimum=shares.min(), maximum=shares.max()).reset_index()
    needles = ablated[["model", "mode", "needle"]].drop_duplicates()
    unchanged_trials = plain_types(run.table("needles")).merge(needles)
    unchanged = unchanged_trials.groupby(["model", "mode"])["success"].agg(["size", "mean"])
    unchanged = unchanged.set_axis(["trials", "share"], axis=1).reset_index()
    start = curve[["model", "mode", "ablation", "top"]].drop_duplicates().merge(unchanged, on=["model", "mode"])
    start = start.assign(size=0, minimum=start["share"], maximum=start["share"])
    joined = pd.concat([start, curve], ignore_index=True)
    low, high = wilson_interval(joined["share"], joined["trials"])
    return joined.assign(low=low, high=high).sort_values([*keys[:3], "top", "size"], ignore_index=True)


def first_separated_size(ablation_rows: pd.DataFrame) -> int | None:
    """The smallest size at which the confidence interval of the top heads is below that of random heads, from rows of
    `ablation_curve` of one model, mode and ablation; None if there is none."""
    top, random = (ablation_rows[ablation_rows["top"] == is_top].set_index("size") for is_top in (True, False))
    below = top["high"] < random["low"].reindex(top.index)
    return int(below.index[below].min()) if below.any() else None


def can_detect_loss(share: float, trials: int) -> bool:
    """Whether losing every needle would be significant, if `share` of the unchanged model's `trials` succeed."""
    low, high = wilson_interval(pd.Series([share, 0.0]), pd.Series([trials, trials]))
    return bool(high[1] < low[0])


def format_share(row: "pd.Series[float]") -> str:
    """Text with a share of trials and its 95 % confidence interval."""
    return f"{row['share']:.0%} (95 % confidence interval {row['low']:.0%} to {row['high']:.0%})"


def scores_by_group(heads: pd.DataFrame) -> pd.DataFrame:
    """One row per (model, layer, kv_group): mean and largest `retrieval` of the query heads that share its keys."""
    groups = heads.dropna(subset=["retrieval"]).groupby(["model", "layer", "kv_group"], observed=True)["retrieval"]
    return groups.agg(["mean", "max"]).reset_index()


def scores_by_seed(run: Run) -> pd.DataFrame:
    """Mean strict score over the successful trials of each seed: rows (model, layer, head, kv_group), columns seeds."""
    rows = run.derived(retrieval_rows)
    good = rows[rows["success"] & (rows["mode"] == "strict")]
    wide = good.groupby([*HEAD_KEYS, "seed"])["score"].mean().unstack("seed").reset_index()
    return wide.assign(model=pd.Categorical(wide["model"], run.models))


def seed_agreement(scores: pd.DataFrame) -> pd.DataFrame:
    """Agreement of seeds: one row per model and pair of seeds, from `scores_by_seed`.

    `spearman` is the rank correlation over heads, -1 .. 1, NaN if all scores are equal; `overlap` is the share of the
    top 10 heads that both have, 0 .. 1.
    """
    return pd.DataFrame(_seed_pair_rows(scores), columns=["model", "first", "second", "spearman", "overlap"])


def model_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Agreement of models with the first one: one row per other model that has scores for the same heads.

    `spearman` and `overlap` of the column `retrieval`, as in `seed_agreement`; `first`, `second` are the labels.
    """
    scores = heads.dropna(subset=["retrieval"]).pivot(index=["layer", "head"], columns="model", values="retrieval")
    first, *others = [label for label in heads["model"].unique() if label in scores] or [None]
    pairs = ((first, other, scores[[first, other]].dropna()) for other in others)
    counts = heads.groupby("model", observed=True).size()
    rows = [
        (first, other, *_rank_agreement(both))
        for first, other, both in pairs
        if len(both) and counts[first] == counts[other] == len(scores[[first, other]].dropna(how="all"))
    ]
    return pd.DataFrame(rows, columns=["first", "second", "spearman", "overlap"])


def seed_columns(scores: pd.DataFrame) -> list[int]:
    """The seed columns of `scores_by_seed`."""
    return [name for name in scores if isinstance(name, int)]


def _seed_pair_rows(scores: pd.DataFrame) -> Iterator[tuple[str, int, int, float, float]]:
    seeds = seed_columns(scores)
    for label, block in scores.groupby("model", observed=True):
        for first, second in combinations(seeds, 2):
            both = block[[first, second]].dropna()
            if len(both):
                yield str(label), first, second, *_rank_agreement(both)


def _rank_agreement(scores: pd.DataFrame) -> tuple[float, float]:
    """Rank correlation of two columns over heads, and the share of the top heads that both have."""
    first, second = (scores[name] for name in scores)
    best = [set(column.sort_values(ascending=False, kind="stable").index[:TOP_COUNT]) for column in (first, second)]
    return float(first.rank().corr(second.rank())), len(best[0] & best[1]) / min(TOP_COUNT, len(scores))


def _spearman_interval(spearman: float, head_count: int) -> tuple[float, float]:
    """95 % confidence interval of a rank correlation; NaN below four heads or for a correlation of ±1."""
    if head_count < 4 or not abs(spearman) < 1:
        return np.nan, np.nan
    reach = NORMAL_QUANTILE * np.sqrt((1 + spearman**2 / 2) / (head_count - 3))
    return float(np.tanh(np.arctanh(spearman) - reach)), float(np.tanh(np.arctanh(spearman) + reach))


def wilson_interval(share: pd.Series, trials: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Lower and upper end of the 95 % Wilson confidence interval of shares of trials."""
    middle = share + NORMAL_QUANTILE**2 / (2 * trials)
    half = NORMAL_QUANTILE * np.sqrt(share * (1 - share) / trials + NORMAL_QUANTILE**2 / (4 * trials**2))
    return ((middle - half) / (1 + NORMAL_QUANTILE**2 / trials)).clip(lower=0), (
        (middle + half) / (1 + NORMAL_QUANTILE**2 / trials)
    ).clip(upper=1)


def _add_wilson_interval(counts: pd.DataFrame) -> pd.DataFrame:
    share = counts["successes"] / counts["trials"]
    low, high = wilson_interval(share, counts["trials"])
    return counts.assign(share=share, low=low, high=high)
