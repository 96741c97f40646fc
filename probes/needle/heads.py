"""What the needle probe says of a head: its columns of the per-head table, and who is called a retrieval head."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.roles import Role
from headscope.runs.run_tables import RunTables
from probes.needle.tables import NEEDLES

RETRIEVAL_THRESHOLD = 0.1
"""Mean retrieval score above which a head is called a retrieval head (Wu et al. 2024)."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "retrieval": Statistic(
            "retrieval score",
            "",
            "mean share of the needle's scored tokens that the head copied (strict), over the trials that succeeded; "
            "missing where none did",
            formula="copied needle tokens / needle tokens",
            best_head_name="top retrieval head",
        ),
        "retrieval_mass": Statistic("needle mass", "", "mean weight on the needle at the answer steps, same trials"),
        "retrieval_indirect": Statistic(
            "retrieval score, indirect needles",
            "",
            "the same over needles whose questions share no word with them",
        ),
        "needle_write": Statistic(
            "write through the needle",
            "logits",
            "mean of what the head adds directly to the logit of an answered token through its weight on the needle, "
            "less what it adds through the tokens there without the needle; over the trials that succeeded",
            formula="Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
            number_format="+.3f",
        ),
        "needle_write_indirect": Statistic(
            "write through the needle, indirect needles",
            "logits",
            "the same over needles whose questions share no word with them",
            number_format="+.3f",
        ),
        "needle_rest": Statistic(
            "write beside the needle",
            "logits",
            "mean of what the head adds directly to the logit of an answered token through all tokens but the "
            "needle's, same trials",
            number_format="+.3f",
        ),
        "retrieval_wu": Statistic("retrieval score (wu)", "", "mean score as the public code of Wu et al. counts it"),
        "retrieval_control": Statistic("retrieval score, no needle", "", "mean strict score in the control trials"),
    }
)

ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "retrieval": Role(
            f"retrieval score above {RETRIEVAL_THRESHOLD}, over needles",
            lambda heads: heads["retrieval"] > RETRIEVAL_THRESHOLD,
            "retrieval",
        )
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by (model, layer, head, kv_group), over successful trials: `retrieval` with its interval over trials,
    `retrieval_mass`, `retrieval_indirect`, `retrieval_wu`, and where it was measured `needle_write` with its interval,
    `needle_write_indirect` and `needle_rest`; over the trials without a needle `retrieval_control`."""
    if "retrieval" not in run.tables:
        return None
    rows = run.derived(retrieval_rows)
    columns: list[pd.DataFrame | pd.Series] = [
        rows[rows["mode"] == CONTROL].groupby(HEAD_KEYS)["score"].mean().rename("retrieval_control")
    ]
    good = {str(mode): block for mode, block in rows[rows["success"]].groupby("mode")}
    if "indirect" in good:
        columns.insert(0, _mean_with_interval(good["indirect"], "score", "retrieval_indirect", 0, 1))
    if "strict" in good:
        mass = good["strict"].groupby(HEAD_KEYS)["mass"].mean().rename("retrieval_mass")
        columns = [_mean_with_interval(good["strict"], "score", "retrieval", 0, 1), mass, *columns]
    if "wu" in good:
        columns.append(good["wu"].groupby(HEAD_KEYS)["score"].mean().rename("retrieval_wu"))
    if "needle_attribution" in run.tables:
        written = run.derived(attribution_rows)
        for mode, block in written[written["success"] & (written["mode"] != CONTROL)].groupby("mode"):
            name = "needle_write" if mode == "strict" else "needle_write_indirect"
            columns.append(_mean_with_interval(block, "net", name))
            if mode == "strict":
                columns.append(block.groupby(HEAD_KEYS)["rest"].mean().rename("needle_rest"))
    return pd.concat(columns, axis=1)


def _mean_with_interval(
    rows: pd.DataFrame, value: str, name: str, minimum: float = -np.inf, maximum: float = np.inf
) -> pd.DataFrame:
    """The mean over trials with its interval, by head."""
    by_trial = rows.set_index([*HEAD_KEYS, "trial"])[value].rename_axis(index={"trial": "doc"})
    return mean_with_interval(by_trial, name, minimum, maximum)


def retrieval_rows(run: RunTables) -> pd.DataFrame:
    """The `retrieval` table with `success` and `trial`, the number of the trial."""
    return add_trial_columns(plain_types(run.table("needles")), plain_types(run.table("retrieval")))


def attribution_rows(run: RunTables) -> pd.DataFrame:
    """The `needle_writes` table with `success`, `trial` and `net`; see `against_control`."""
    return subtract_control(
        add_trial_columns(plain_types(run.table("needles")), plain_types(run.table("needle_attribution")))
    )


def add_trial_columns(trials: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of heads with `success` and `trial`, the number of the trial."""
    numbered = trials.assign(trial=np.arange(len(trials)))
    return rows.merge(numbered[[*NEEDLES.keys, "success", "trial"]], on=NEEDLES.keys)


def subtract_control(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `needle_writes` with `net`: what comes through the needle less what does where it would have been."""
    same = [*(name for name in NEEDLES.keys if name != "mode"), "layer", "head", "kv_group"]
    control = rows[rows["mode"] == CONTROL].set_index(same)["through"].rename("control")
    joined = rows.join(control, on=same)
    return joined.assign(net=joined["through"] - joined["control"]).drop(columns="control")


def rank_heads(trials: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame | None:
    """Every head of one model by its mean score over the successful trials, the highest first: `layer`, `head`,
    `score`, which is the share copied or, from rows of `needle_writes`, `net`. None without a success."""
    told = add_trial_columns(plain_types(trials), plain_types(rows))
    told = told if "score" in told else subtract_control(told).assign(score=lambda each: each["net"])
    good = told[told["success"] & (told["mode"] != CONTROL)]
    if good.empty:
        return None
    means = good.groupby(["layer", "head"])["score"].mean().reset_index()
    return means.sort_values("score", ascending=False, kind="stable", ignore_index=True)
