"""Analysis of needle trials: success by cell, retrieval scores by head, KV group, seed and model, ablation curves."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from headscope.prompts.needle_grid import CONTROL
from headscope.results.effects.statistics import rank_correlation
from headscope.results.effects.sweep import Effects, Sweep, effects_table, rows_of_sweep, sweep_effects
from headscope.runs.aggregation import (
    HEAD_KEYS,
    MIN_DOCUMENTS,
    difference_interval,
    plain_types,
    wilson_interval,
)
from headscope.runs.column_metadata import Statistic, exceeds
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.needle.scores import RETRIEVAL_THRESHOLD, retrieval_rows, trial_names

MODE_LABELS = {"strict": "needles", "indirect": "paraphrased needles", "wu": "needles, as Wu et al. count"}
"""Name of the needles of each mode in sentences, in display order."""
PUBLISHED_SHARES = {"above": (0.03, 0.06), "zero": (0.45, 0.73)}
"""Range over the models of Wu et al. 2024: share of heads with a score above 0.1 and with a score of exactly 0."""
TOP_COUNT = 10
"""Top heads of each ranking whose overlap is reported."""
AGREEMENT_COLUMNS = ["first", "second", "spearman", "low", "high", "overlap", "top", "heads"]
DETECTOR_PAIRS = (
    ("retrieval", "needle_write"),
    ("retrieval", "needle_write_indirect"),
    ("needle_write", "needle_write_indirect"),
    ("retrieval_indirect", "needle_write_indirect"),
)
"""Pairs of columns of the per-head table that are two scores of retrieval heads."""
MIN_DRAWS = 2
"""Fewest draws of random heads for an interval over them."""
MAX_PLANNED_TRIALS = 1000
"""Number of trials beyond which none is proposed."""
MAX_PLANNED_DRAWS = 1000
"""Number of draws beyond which none is proposed."""
ABLATION_SWEEP = Sweep(
    keys=("model", "mode", "intervention"), sample="trial", value="success", units=("heads", "size"), is_share=True
)
"""Success with heads ablated, see `ablation_sweeps`."""


STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "retrieval_success": Statistic("retrieval success", "", "share of trials in which the model states the needle"),
        "retrieval_success_indirect": Statistic(
            "retrieval success, paraphrased questions",
            "",
            "share of trials with paraphrased questions in which the model states the needle",
        ),
        "retrieval_success_wu": Statistic(
            "retrieval success (Wu et al.)", "", "share of trials in which the model states the needle, in mode wu"
        ),
    }
)


def present_modes(needles: pd.DataFrame) -> list[str]:
    """The modes of these trials in display order, without the control."""
    modes = set(needles["mode"])
    return [mode for mode in MODE_LABELS if mode in modes]


def success_rates(trials: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Number of `trials` and `successes`, their `share` and its 95 % confidence interval (Wilson) `low` .. `high`, by
    these columns (index). The control is one of the modes."""
    counts = trials.groupby([*by], observed=True).agg(trials=("success", "size"), successes=("success", "sum"))
    share = counts["successes"] / counts["trials"]
    low, high = wilson_interval(share, counts["trials"])
    return counts.assign(share=share, low=low, high=high)


def retrieval_summary(run: Run) -> pd.DataFrame:
    """One row per model and mode, without controls.

    `trials`, `successes`, `share`, `low`, `high` as in `success_rates`. Over the successful trials: `above`, the
    share of heads whose mean score is above 0.1; `zero`, the share at exactly 0; `layer`, `head` and `top`, the top
    head and its score; NaN without a successful trial. `control` is the largest mean score of a head in the control,
    and `control_successes` of `control_trials` without the needle give the answer all the same.
    """
    counts = success_rates(run.needles, ["model", "mode"]).reset_index().astype({"model": "str", "mode": "str"})
    counts = counts[counts["mode"] != CONTROL]
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


def model_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by model: `retrieval_success` of each mode with its interval."""
    if "needles" not in run.tables:
        return None
    trials = plain_types(run.table("needles"))
    columns = []
    for mode in present_modes(trials):
        rates = success_rates(trials[trials["mode"] == mode], ["model"])[["share", "low", "high"]]
        name = retrieval_column(mode, "retrieval_success")
        columns.append(rates.set_axis([name, f"{name}_low", f"{name}_high"], axis=1))
    return pd.concat(columns, axis=1)


def _control_counts(needles: pd.DataFrame, label: str) -> dict[str, int]:
    """Number of prompts without the needle, which count once for all depths, and of those that are answered."""
    control = needles[(needles["model"] == label) & (needles["mode"] == CONTROL)]
    prompts = control.drop_duplicates(["needle", "context_length", "doc", "seed"])
    return {"control_trials": len(prompts), "control_successes": int(prompts["success"].sum())}


def retrieval_column(mode: str, name: str = "retrieval") -> str:
    """The column of the per-head table with the scores of a mode, or of the per-model table with its success."""
    return name if mode == "strict" else f"{name}_{mode}"


def detector_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Agreement of detectors: one row per model and measured pair of `DETECTOR_PAIRS`.

    `first`, `second` are the columns; the others are those of `seed_agreement`.
    """
    rows = [
        {"model": str(label), "first": first, "second": second, **_rank_agreement(common_scores)}
        for label, block in heads.groupby("model", observed=True)
        for first, second in DETECTOR_PAIRS
        if len(common_scores := block.reindex(columns=[first, second]).dropna())
    ]
    return pd.DataFrame(rows, columns=["model", *AGREEMENT_COLUMNS])


def ablation_sweeps(run: RunTables) -> list[Effects]:
    """The success of every trial by model, mode and kind of ablation (the intervention).

    A unit is `heads`, "top" or "random" (of the same layers, mean over draws; absent without a control), and `size`,
    the number of ablated heads; 0 for the unchanged model, which counts as both. Their intervals are over trials, for
    the sets that were drawn.
    """
    rows = _ablation_rows(run)
    needles = rows[[*ABLATION_SWEEP.keys, "heads", "needle"]].drop_duplicates()
    unchanged = plain_types(run.table("needles")).merge(needles).assign(size=0)
    rows = pd.concat([unchanged, rows], ignore_index=True).astype({"success": "float64"})
    return sweep_effects(rows.assign(trial=trial_names(rows)), ABLATION_SWEEP, run.models)


def ablation_curves(run: Run) -> pd.DataFrame:
    """The units of all `ablation_sweeps` with their keys, and `minimum` and `maximum` over draws of random heads."""
    keys = [*ABLATION_SWEEP.keys, *ABLATION_SWEEP.units]
    of_draws = _ablation_rows(run).groupby([*keys, "draw"])["success"].mean().groupby(keys)
    extremes = of_draws.agg(minimum="min", maximum="max")
    curves = effects_table(run.derived(ablation_sweeps)).join(extremes, on=keys)
    return curves.fillna({"minimum": curves["effect"], "maximum": curves["effect"]})


def _ablation_rows(run: RunTables) -> pd.DataFrame:
    """Trials with ablated heads. A size whose top heads have no control in one half of the needles has none."""
    rows = plain_types(run.table("needle_ablation")).rename(columns={"ablation": "intervention"})
    sizes = [*ABLATION_SWEEP.keys, "size"]
    tested, of_size = (rows.groupby(keys)["needle"].transform("nunique") for keys in ([*sizes, "draw"], sizes))
    return rows.assign(heads=np.where(rows["draw"] == 0, "top", "random"))[tested == of_size]


def half_width_over_draws(run: RunTables, key: Mapping[str, Any], size: int) -> tuple[int, float]:
    """Number of draws of random heads of a size in the sweep with these keys, and half the width of the 95 % confidence
    interval of their mean success over draws (Student's t), 0..; NaN for one draw.

    A draw has two head sets, one for each half of the needles, so two draws are four sets.
    """
    rows = rows_of_sweep(_ablation_rows(run), {**key, "heads": "random", "size": size})
    by_draw = rows.groupby("draw")["success"].mean().to_numpy(np.float64)
    draws = len(by_draw)
    if draws < MIN_DRAWS:
        return draws, math.nan
    return draws, float(stdtrit(draws - 1, 0.975) * by_draw.std(ddof=1) / math.sqrt(draws))


def draws_to_detect(distance: float, over_trials: float, draws: int, over_draws: float) -> int | None:
    """Fewest draws of random heads at which the joint half width over trials and draws is at most `distance`.

    At the spread of these `draws`, with a half width `over_draws` (Student's t), and as many trials. None above
    `MAX_PLANNED_DRAWS`.
    """
    spread = over_draws * math.sqrt(draws) / stdtrit(draws - 1, 0.975)
    for planned in range(MIN_DRAWS, MAX_PLANNED_DRAWS):
        if math.hypot(over_trials, stdtrit(planned - 1, 0.975) * spread / math.sqrt(planned)) <= distance:
            return planned
    return None


def trials_to_detect_retrieval_drop(random: float) -> int | None:
    """Fewest trials in which the loss of every needle would differ from this success with random heads ablated."""
    for trials in range(MIN_DOCUMENTS, MAX_PLANNED_TRIALS):
        lost, kept = ((share, *wilson_interval(share, trials)) for share in (0.0, random))
        if difference_interval(kept, lost)[0] > 0:
            return trials
    return None


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

    `spearman` is the rank correlation over `heads` heads, -1 .. 1, NaN if all scores are equal; `low` .. `high` is its
    95 % confidence interval over heads (Fisher's z, variance of Bonett and Wright 2000 [ours]); `overlap` is the share
    of the top 10 heads that both seeds have in common, 0 .. 1.
    """
    rows = [
        {"model": str(label), "first": first, "second": second, **_rank_agreement(common_scores)}
        for label, block in scores.groupby("model", observed=True)
        for first, second in combinations(seed_columns(scores), 2)
        if len(common_scores := block[[first, second]].dropna())
    ]
    return pd.DataFrame(rows, columns=["model", *AGREEMENT_COLUMNS])


def model_agreement(heads: pd.DataFrame) -> pd.DataFrame:
    """Agreement of the first model with each other model that has scores for the same heads: one row per pair.

    `first`, `second` are the labels; the others are those of `seed_agreement` for the column `retrieval`.
    """
    scores = heads.dropna(subset=["retrieval"]).pivot(index=["layer", "head"], columns="model", values="retrieval")
    first, *other_models = [label for label in heads["model"].unique() if label in scores] or [None]
    pairs = ((other, scores[[first, other]].dropna()) for other in other_models)
    counts = heads.groupby("model", observed=True).size()
    rows = [
        {"first": first, "second": other, **_rank_agreement(common_scores)}
        for other, common_scores in pairs
        if len(common_scores) and counts[first] == counts[other] == len(scores[[first, other]].dropna(how="all"))
    ]
    return pd.DataFrame(rows, columns=AGREEMENT_COLUMNS)


def seed_columns(scores: pd.DataFrame) -> list[int]:
    """The seed columns of `scores_by_seed`."""
    return [name for name in scores if isinstance(name, int)]


def _rank_agreement(scores: pd.DataFrame) -> dict[str, float]:
    """Agreement of two columns over heads, as in `seed_agreement`."""
    first, second = (scores[name] for name in scores)
    top = min(TOP_COUNT, len(scores) // 2)  # all heads overlap with all heads
    top_first, top_second = (
        set(column.sort_values(ascending=False, kind="stable").index[:top]) for column in (first, second)
    )
    spearman, low, high = rank_correlation(first, second)
    overlap = len(top_first & top_second) / max(top, 1)
    return {"spearman": spearman, "low": low, "high": high, "overlap": overlap, "top": top, "heads": len(scores)}
