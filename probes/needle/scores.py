"""The scores of the needle probe: copies and weight of the needle, and attribution through it, by kind of trial."""

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.results.questions import Question
from headscope.results.scores import Score, ScoreRole
from headscope.runs.aggregation import HEAD_KEYS, plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.needle.declaration import NEEDLES


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


RETRIEVAL_THRESHOLD = 0.1
"""Mean retrieval score above which a head is called a retrieval head (Wu et al. 2024)."""
VARIANTS = {"strict": "", "indirect": "paraphrased questions", "wu": "copies counted as by Wu et al."}
"""What distinguishes the trials of each mode in a sentence."""

_TOP_RETRIEVAL = Question(
    name="retrieval.top_head",
    sentence="The top retrieval head of {model}[ with {variant}] is {unit}, which copies {value} of the needle in "
    "successful trials[; next are {next:percent}]",
    headline="Top retrieval head[ with {variant}]: {unit} copies {value}",
    number="percent",
    samples="trials",
    level="headline",
)
_TOP_ATTRIBUTION = Question(
    name="retrieval.attribution",
    sentence="In {model}, attribution through the needle[ with {variant}] is largest for {unit}: {value}[; next "
    "are {next:+.2f}]",
    number="+.2f",
    value_unit="logits",
    samples="trials",
)


def trial_values(value: str, mode: str, run: RunTables) -> pd.DataFrame | None:
    """A value of each head in the successful trials of a mode, or in all control trials: of `retrieval_rows`, or `net`
    or `rest` of `attribution_rows`."""
    table, form_rows = (
        ("needle_attribution", attribution_rows) if value in ("net", "rest") else ("retrieval", retrieval_rows)
    )
    if table not in run.tables:
        return None
    rows = run.derived(form_rows)
    rows = rows[(rows["mode"] == mode) & (rows["success"] | (mode == CONTROL))]
    names = pd.Series(trial_names(run.table("needles")))
    # Trials keep their order, which that of their names is not.
    trials = pd.Categorical(names.iloc[rows["trial"]], categories=names.unique())
    return rows[HEAD_KEYS].assign(value=rows[value], doc=trials)


def mean_values(value: str, mode: str, run: RunTables) -> pd.DataFrame | None:
    """The mean of `trial_values` by head, without an interval: control trials at several depths have one prompt."""
    rows = trial_values(value, mode, run)
    return None if rows is None else rows.groupby(HEAD_KEYS)["value"].mean().reset_index()


def _score(column: str, value: str, mode: str, label: str, meaning: str, **fields: Any) -> Score:
    """The score whose rows are `trial_values`; `fields` are those of its statistic."""
    top = None if mode == CONTROL else {"score": _TOP_RETRIEVAL, "net": _TOP_ATTRIBUTION}.get(value)
    is_attribution = value in ("net", "rest")
    unit, number_format = ("logits", "+.3f") if is_attribution else ("", "")
    role = ScoreRole(
        name="retrieval",
        meaning=f"retrieval score above {RETRIEVAL_THRESHOLD}",
        threshold=RETRIEVAL_THRESHOLD,
        has_card=True,
    )
    return Score(
        column=column,
        statistic=Statistic(label, unit, meaning, number_format=number_format, **fields),
        rows=partial(trial_values if top else mean_values, value, mode),
        limits=(-math.inf, math.inf) if is_attribution else (0, math.inf if mode == "wu" else 1),
        role=role if column == "retrieval" else None,
        top=top,
        where={"mode": mode},
        details={"variant": VARIANTS.get(mode, "")},
    )


SCORES = (
    _score(
        "retrieval",
        "score",
        "strict",
        "retrieval score",
        "mean share of the needle's scored tokens that the head copied (strict), over successful trials; missing if "
        "there are none",
        formula="copied needle tokens / needle tokens",
        best_head_name="top retrieval head",
    ),
    _score(
        "retrieval_mass",
        "mass",
        "strict",
        "needle mass",
        "mean attention weight on the needle at the answer steps, over successful trials",
    ),
    _score(
        "retrieval_indirect",
        "score",
        "indirect",
        "retrieval score for paraphrased questions",
        "retrieval score over needles whose questions share no word with them",
    ),
    _score(
        "needle_write",
        "net",
        "strict",
        "attribution through the needle",
        "mean direct logit attribution to an answer token through the needle, minus the same through the tokens at its "
        "position without the needle; over successful trials",
        formula="Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
    ),
    _score(
        "needle_write_indirect",
        "net",
        "indirect",
        "attribution through the needle for paraphrased questions",
        "attribution through the needle, over needles whose questions share no word with them",
    ),
    _score(
        "needle_rest",
        "rest",
        "strict",
        "attribution through other tokens",
        "mean direct logit attribution to an answer token through all tokens except the needle's, over successful "
        "trials",
    ),
    _score(
        "retrieval_wu",
        "score",
        "wu",
        "retrieval score (Wu et al.)",
        "mean retrieval score, counted as in Wu et al.'s code",
    ),
    _score(
        "retrieval_control",
        "score",
        CONTROL,
        "retrieval score, no needle",
        "mean strict score in the control trials",
    ),
)
