"""Analysis of needle trials: success by cell, retrieval scores by head, KV group, seed and model, ablation curves."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.report.text import format_percent
from headscope.runs.aggregation import HEAD_KEYS, NORMAL_QUANTILE, plain_types, wilson_interval
from headscope.runs.column_metadata import exceeds
from headscope.runs.run import Run
from probes.needle.heads import RETRIEVAL_THRESHOLD, retrieval_rows

MODE_LABELS = {"strict": "needles", "indirect": "paraphrased needles", "wu": "needles, as Wu et al. count"}
"""Name of the needles of each mode in sentences, in display order."""
PUBLISHED_SHARES = {"above": (0.03, 0.06), "zero": (0.45, 0.73)}
"""Range over the models of Wu et al. 2024: share of heads with a score above 0.1 and with a score of exactly 0."""
TOP_COUNT = 10
"""Top heads of each ranking whose overlap is reported."""
LISTED_HEADS = 5
"""Heads listed in a finding."""
DETECTOR_PAIRS = (
    ("retrieval", "needle_write"),
    ("retrieval", "needle_write_indirect"),
    ("needle_write", "needle_write_indirect"),
    ("retrieval_indirect", "needle_write_indirect"),
)
"""Pairs of columns of the per-head table that are two scores of retrieval heads."""


def present_modes(needles: pd.DataFrame) -> list[str]:
    """The modes of these trials in display order, without the control."""
    modes = set(needles["mode"])
    return [mode for mode in MODE_LABELS if mode in modes]


def success_by_cell(needles: pd.DataFrame) -> pd.DataFrame:
    """One row per (model, mode, context_length, depth): `trials`, `successes`, their `share` and its 95 % confidence
    interval (Wilson) `low` .. `high`. The control is one of the modes."""
    groups = needles.groupby(["model", "mode", "context_length", "depth"], observed=True)["success"]
    return _add_wilson_interval(groups.agg(trials="size", successes="sum").reset_index())


def retrieval_summary(run: Run) -> pd.DataFrame:
    """One row per model and mode, without controls.

    `trials`, `successes`, `share`, `low`, `high` as in `success_by_cell`. Over the successful trials: `above`, the
    share of heads whose mean score is above 0.1; `zero`, the share at exactly 0; `layer`, `head` and `top`, the top
    head and its score; NaN without a successful trial. `control` is the largest mean score of a head in the control,
    and `control_successes` of `control_trials` without the needle give the answer all the same.
    """
    trials = run.needles.groupby(["model", "mode"], observed=True)["success"]
    counts = trials.agg(trials="size", successes="sum").reset_index().astype({"model": "str", "mode": "str"})
    counts = _add_wilson_interval(counts[counts["mode"] != CONTROL])
    heads = run.heads.astype({"model": "str"})
    rows = []
    for label, mode in counts[["model", "mode"]].itertuples(index=False):
        block = heads[heads["model"] == label]
        scores = block.get(retrieval_column(mode), pd.Series(np.nan, block.index)).dropna()
        top_head = block.loc[scores.idxmax()] if len(scores) else None
        rows.append(
            {
                "above": exceeds(scores, RETRIEVAL_THRESHOLD).mean(),
                "zero": (scores == 0).mean(),
                "layer": np.nan if top_head is None else top_head["layer"],
                "head": np.nan if top_head is None else top_head["head"],
                "top": scores.max(),
                "control": block["retrieval_control"].max() if "retrieval_control" in block else np.nan,
                **_control_counts(run.needles, label),
            }
        )
    return counts.reset_index(drop=True).join(pd.DataFrame(rows))


def _control_counts(needles: pd.DataFrame, label: str) -> dict[str, int]:
    """Number of prompts without the needle, which count once for all depths, and of those that are answered."""
    control = needles[(needles["model"] == label) & (needles["mode"] == CONTROL)]
    prompts = control.drop_duplicates(["needle", "context_length", "doc", "seed"])
    return {"control_trials": len(prompts), "control_successes": int(prompts["success"].sum())}


def retrieval_column(mode: str) -> str:
    """The column of the per-head table with the scores of a mode."""
    return "retrieval" if mode == "strict" else f"retrieval_{mode}"


def top_heads(run: Run, model: str, mode: str) -> list[tuple[int, int, float]]:
    """Layer, head and score of the `LISTED_HEADS` heads of `model` with the highest scores, in descending order."""
    score = retrieval_column(mode)
    ordered = run.heads[run.heads["model"] == model].sort_values(score, ascending=False, kind="stable")
    return [*ordered[["layer", "head", score]].head(LISTED_HEADS).itertuples(index=False, name=None)]


def detector_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Agreement of detectors: one row per model and measured pair of `DETECTOR_PAIRS`.

    `first`, `second` are the columns; `spearman` and `overlap` as in `seed_agreement`; `low` .. `high` is the 95 %
    confidence interval of the correlation over heads (Fisher's z, variance of Bonett and Wright 2000 [ours]).
    """
    rows = []
    for label, block in heads.groupby("model", observed=True):
        for first, second in DETECTOR_PAIRS:
            common_scores = block.reindex(columns=[first, second]).dropna()
            if len(common_scores):
                spearman, overlap = _rank_agreement(common_scores)
                rows.append(
                    (str(label), first, second, spearman, *_spearman_interval(spearman, len(common_scores)), overlap)
                )
    return pd.DataFrame(rows, columns=["model", "first", "second", "spearman", "low", "high", "overlap"])


def ablation_curve(run: Run) -> pd.DataFrame:
    """Success with heads ablated: one row per (model, mode, ablation, size, top).

    `size` is the number of ablated heads, 0 for the unchanged model; `top` is True for the top heads and False for
    random heads. `share` is the share of `trials` that succeed. For random heads it is the mean over draws, with
    extremes `minimum` and `maximum`. `low` .. `high` is the 95 % confidence interval (Wilson) over the trials of one
    set of heads, so more draws do not make it narrower.
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


def share_difference(first: "pd.Series[float]", second: "pd.Series[float]") -> tuple[float, float]:
    """95 % confidence interval of the difference of two shares, `first` minus `second` (Newcombe 1998, method 10).

    Both have `share` and the bounds `low` and `high` of its Wilson interval.
    """
    difference = first["share"] - second["share"]
    below = math.hypot(first["share"] - first["low"], second["high"] - second["share"])
    above = math.hypot(first["high"] - first["share"], second["share"] - second["low"])
    return difference - below, difference + above


def can_detect_retrieval_drop(random: "pd.Series[float]", trials: int) -> bool:
    """Whether the loss of every needle would differ from the success with random heads ablated."""
    low, high = wilson_interval(pd.Series([0.0]), pd.Series([trials]))
    lost = pd.Series({"share": 0.0, "low": low[0], "high": high[0]})
    return share_difference(random, lost)[0] > 0


def format_share(row: "pd.Series[float] | dict[Any, Any]") -> str:
    """Text with the `share` of successful trials and its 95 % confidence interval, `low` to `high`."""
    return f"{format_percent(row['share'])} ({format_share_interval(row)})"


def format_share_interval(row: "pd.Series[float] | dict[Any, Any]") -> str:
    """Text with the 95 % confidence interval of a share, `low` to `high`."""
    return f"95 % confidence interval {format_percent(row['low'])} to {format_percent(row['high'])}"


def scores_by_group(heads: pd.DataFrame) -> pd.DataFrame:
    """One row per (model, layer, kv_group): `mean` and `max` of the column `retrieval` over its query heads."""
    groups = heads.dropna(subset=["retrieval"]).groupby(["model", "layer", "kv_group"], observed=True)["retrieval"]
    return groups.agg(["mean", "max"]).reset_index()


def scores_by_seed(run: Run) -> pd.DataFrame:
    """Mean strict score over the successful trials of each seed: one row per (model, layer, head, kv_group), one
    column per seed."""
    rows = run.derived(retrieval_rows)
    successful = rows[rows["success"] & (rows["mode"] == "strict")]
    wide = successful.groupby([*HEAD_KEYS, "seed"])["score"].mean().unstack("seed").reset_index()
    return wide.assign(model=pd.Categorical(wide["model"], run.models))


def seed_agreement(scores: pd.DataFrame) -> pd.DataFrame:
    """Agreement of seeds, from `scores_by_seed`: one row per model and pair of seeds `first`, `second`.

    `spearman` is the rank correlation over heads, -1 .. 1, NaN if all scores are equal; `overlap` is the share of the
    top 10 heads that both seeds have in common, 0 .. 1.
    """
    return pd.DataFrame(_seed_pair_rows(scores), columns=["model", "first", "second", "spearman", "overlap"])


def model_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Agreement of the first model with each other model that has scores for the same heads: one row per pair.

    `first`, `second` are the labels; `spearman` and `overlap` of the column `retrieval` as in `seed_agreement`.
    """
    scores = heads.dropna(subset=["retrieval"]).pivot(index=["layer", "head"], columns="model", values="retrieval")
    first, *other_models = [label for label in heads["model"].unique() if label in scores] or [None]
    pairs = ((first, other, scores[[first, other]].dropna()) for other in other_models)
    counts = heads.groupby("model", observed=True).size()
    rows = [
        (first, other, *_rank_agreement(common_scores))
        for first, other, common_scores in pairs
        if len(common_scores) and counts[first] == counts[other] == len(scores[[first, other]].dropna(how="all"))
    ]
    return pd.DataFrame(rows, columns=["first", "second", "spearman", "overlap"])


def seed_columns(scores: pd.DataFrame) -> list[int]:
    """The seed columns of `scores_by_seed`."""
    return [name for name in scores if isinstance(name, int)]


def _seed_pair_rows(scores: pd.DataFrame) -> Iterator[tuple[str, int, int, float, float]]:
    seeds = seed_columns(scores)
    for label, block in scores.groupby("model", observed=True):
        for first, second in combinations(seeds, 2):
            common_scores = block[[first, second]].dropna()
            if len(common_scores):
                yield str(label), first, second, *_rank_agreement(common_scores)


def _rank_agreement(scores: pd.DataFrame) -> tuple[float, float]:
    """Rank correlation of two columns over heads, and the share of the top heads that they have in common."""
    first, second = (scores[name] for name in scores)
    top_first, top_second = (
        set(column.sort_values(ascending=False, kind="stable").index[:TOP_COUNT]) for column in (first, second)
    )
    return float(first.rank().corr(second.rank())), len(top_first & top_second) / min(TOP_COUNT, len(scores))


def _spearman_interval(spearman: float, head_count: int) -> tuple[float, float]:
    """95 % confidence interval of a rank correlation; NaN below four heads or for a correlation of ±1."""
    if head_count < 4 or not abs(spearman) < 1:
        return np.nan, np.nan
    half_width = NORMAL_QUANTILE * np.sqrt((1 + spearman**2 / 2) / (head_count - 3))
    return float(np.tanh(np.arctanh(spearman) - half_width)), float(np.tanh(np.arctanh(spearman) + half_width))


def _add_wilson_interval(counts: pd.DataFrame) -> pd.DataFrame:
    """Add `share`, `low` and `high` to `trials` and `successes`."""
    share = counts["successes"] / counts["trials"]
    low, high = wilson_interval(share, counts["trials"])
    return counts.assign(share=share, low=low, high=high)
