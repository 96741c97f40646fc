"""Rows of heads with the trial that each belongs to and its success, and the ranking of heads by them."""

import numpy as np
import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.runs.aggregation import plain_types
from headscope.runs.run_tables import RunTables
from probes.needle.schema import NEEDLES


def trial_names(trials: pd.DataFrame) -> list[str]:
    """A name of each trial that is the same in every run: needle, context length, depth and haystack."""
    keys = [trials[name].astype(str) for name in ("needle", "context_length", "depth", "doc")]
    return [", ".join(names) for names in zip(*keys, strict=True)]


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
