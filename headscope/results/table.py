"""Results as a table: one row each, with stable columns."""

from collections.abc import Iterable

import pandas as pd

from headscope.base.heads import EXACT
from headscope.results.collection import with_parts
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.results.words import sentence

COLUMNS = (
    "question",
    "model",
    "baseline",
    "where",
    "unit",
    "value",
    "low",
    "high",
    "n",
    "samples",
    "method",
    "p_adjusted",
    "verdict",
    "level",
    "topic",
    "text",
    "layer",
    "kv_group",
    "head",
)
"""Columns of `run.findings()`."""


def results_table(results: Iterable[Result]) -> pd.DataFrame:
    """One row per result, its parts after it; the columns are `COLUMNS`.

    question, model, baseline and where are the key, equal in every run that asks the same. unit: head or KV group.
    low and high: 95 % confidence interval; n: number of `samples`. method: exact or estimate.
    """
    frame = pd.DataFrame(map(_row, with_parts(results)), columns=COLUMNS)
    return frame.astype(dict.fromkeys(("n", "layer", "kv_group", "head"), "Int64"))


def _row(result: Result) -> dict[str, object]:
    question = questions()[result.question]
    conditions = ", ".join(f"{name}={value}" for name, value in sorted(result.where.items()))
    values = {name: getattr(result, name) for name in COLUMNS if hasattr(result, name)}
    return values | {
        "where": conditions,
        "samples": question.samples,
        "method": EXACT if result.is_exact else "estimate",
        "level": question.level,
        "topic": question.topic,
        "text": sentence(result),
    }
