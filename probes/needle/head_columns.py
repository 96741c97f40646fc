"""Columns of the needle probe in the per-head table, and the role of retrieval heads."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types
from headscope.runs.column_metadata import Role, Statistic, exceeds
from headscope.runs.run_tables import RunTables
from probes.needle.schema import NEEDLES

RETRIEVAL_THRESHOLD = 0.1
"""Mean retrieval score above which a head is called a retrieval head (Wu et al. 2024)."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "retrieval": Statistic(
            "retrieval score",
            "",
            "mean share of the needle's scored tokens that the head copied (strict), over successful "
            "trials; missing if there are none",
            formula="copied needle tokens / needle tokens",
            best_head_name="top retrieval head",
        ),
        "retrieval_mass": Statistic(
            "needle mass", "", "mean attention weight on the needle at the answer steps, over successful trials"
        ),
        "retrieval_indirect": Statistic(
            "retrieval score for paraphrased questions",
            "",
            "retrieval score over needles whose questions share no word with them",
        ),
        "needle_write": Statistic(
            "attribution through the needle",
            "logits",
            "mean direct logit attribution to an answer token through the needle, minus the same through the tokens at "
            "its position without the needle; over successful trials",
            formula="Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
            number_format="+.3f",
        ),
        "needle_write_indirect": Statistic(
            "attribution through the needle for paraphrased questions",
            "logits",
            "attribution through the needle, over needles whose questions share no word with them",
            number_format="+.3f",
        ),
        "needle_rest": Statistic(
            "attribution through other tokens",
            "logits",
            "mean direct logit attribution to an answer token through all tokens except the needle's, over successful "
            "trials",
            number_format="+.3f",
        ),
        "retrieval_wu": Statistic(
            "retrieval score (Wu et al.)", "", "mean retrieval score, counted as in Wu et al.'s code"
        ),
        "retrieval_control": Statistic("retrieval score, no needle", "", "mean strict score in the control trials"),
        "retrieval_success": Statistic("retrieval success", "", "share of trials in which the model states the needle"),
        "retrieval_success_indirect": Statistic(
            "retrieval success, paraphrased questions",
            "",
            "share of trials with paraphrased questions in which the model states the needle",
        ),
        "retrieval_success_wu": Statistic(
            "retrieval success (Wu et al.)", "", "share of trials in which the model states the needle, in mode wu"
        ),
        "retrieval_heads": Statistic(
            "retrieval heads",
            "",
            f"number of heads with a retrieval score above {RETRIEVAL_THRESHOLD}",
            number_format=".0f",
        ),
    }
)

ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "retrieval": Role(
            f"retrieval score above {RETRIEVAL_THRESHOLD}",
            lambda heads: exceeds(heads["retrieval"], RETRIEVAL_THRESHOLD),
            "retrieval",
            threshold=RETRIEVAL_THRESHOLD,
        )
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by (model, layer, head, kv_group) over successful trials: `retrieval` with its confidence interval,
    `retrieval_mass`, `retrieval_indirect`, `retrieval_wu`, and if measured `needle_write` with its interval,
    `needle_write_indirect` and `needle_rest`; over control trials `retrieval_control`."""
    if "retrieval" not in run.tables:
        return None
    rows = run.derived(retrieval_rows)
    columns: list[pd.DataFrame | pd.Series] = [
        rows[rows["mode"] == CONTROL].groupby(HEAD_KEYS)["score"].mean().rename("retrieval_control")
    ]
    successful = {str(mode): block for mode, block in rows[rows["success"]].groupby("mode")}
    if "indirect" in successful:
        columns.insert(0, _mean_with_interval(successful["indirect"], "score", "retrieval_indirect", 0, 1))
    if "strict" in successful:
        mass = successful["strict"].groupby(HEAD_KEYS)["mass"].mean().rename("retrieval_mass")
        columns = [_mean_with_interval(successful["strict"], "score", "retrieval", 0, 1), mass, *columns]
    if "wu" in successful:
        columns.append(successful["wu"].groupby(HEAD_KEYS)["score"].mean().rename("retrieval_wu"))
    if "needle_attribution" in run.tables:
        attribution = run.derived(attribution_rows)
        for mode, block in attribution[attribution["success"] & (attribution["mode"] != CONTROL)].groupby("mode"):
            name = "needle_write" if mode == "strict" else "needle_write_indirect"
            columns.append(_mean_with_interval(block, "net", name))
            if mode == "strict":
                columns.append(block.groupby(HEAD_KEYS)["rest"].mean().rename("needle_rest"))
    return pd.concat(columns, axis=1)


def _mean_with_interval(
    rows: pd.DataFrame, value: str, name: str, minimum: float = -np.inf, maximum: float = np.inf
) -> pd.DataFrame:
    """The mean over trials with its confidence interval, by head."""
    by_trial = rows.set_index([*HEAD_KEYS, "trial"])[value].rename_axis(index={"trial": "doc"})
    return mean_with_interval(by_trial, name, minimum, maximum)


def retrieval_rows(run: RunTables) -> pd.DataFrame:
    """The `retrieval` table with columns `success` and `trial`, the number of the trial."""
    return add_trial_columns(plain_types(run.table("needles")), plain_types(run.table("retrieval")))


def attribution_rows(run: RunTables) -> pd.DataFrame:
    """The `needle_attribution` table with columns `success`, `trial` and `net` (see `subtract_control`)."""
    return subtract_control(
        add_trial_columns(plain_types(run.table("needles")), plain_types(run.table("needle_attribution")))
    )


def add_trial_columns(trials: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Add the columns `success` and `trial`, the number of the trial, to rows of heads."""
    numbered = trials.assign(trial=np.arange(len(trials)))
    return rows.merge(numbered[[*NEEDLES.keys, "success", "trial"]], on=NEEDLES.keys)


def subtract_control(rows: pd.DataFrame) -> pd.DataFrame:
    """Add `net` to rows of `needle_attribution`: attribution through the needle minus that of the control."""
    keys = [*(name for name in NEEDLES.keys if name != "mode"), "layer", "head", "kv_group"]
    control = rows[rows["mode"] == CONTROL].set_index(keys)["through"].rename("control")
    joined = rows.join(control, on=keys)
    return joined.assign(net=joined["through"] - joined["control"]).drop(columns="control")


def rank_heads(trials: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame | None:
    """The heads of one model in descending order of mean score over successful trials: `layer`, `head`, `score`.

    The score is the retrieval score or, for rows of `needle_attribution`, `net`. None without a successful trial.
    """
    scores = add_trial_columns(plain_types(trials), plain_types(rows))
    scores = scores if "score" in scores else subtract_control(scores).rename(columns={"net": "score"})
    successful = scores[scores["success"] & (scores["mode"] != CONTROL)]
    if successful.empty:
        return None
    means = successful.groupby(["layer", "head"])["score"].mean().reset_index()
    return means.sort_values("score", ascending=False, kind="stable", ignore_index=True)
