"""Results of direct logit attribution: the terms of the logit, and the heads with the largest and smallest; of the next
token and of answers."""

import math
from collections.abc import Iterator

import pandas as pd

from headscope.rendering.text import heads_by_model
from headscope.results.ranks import head_ranks
from headscope.results.result import Result
from headscope.results.samples import extreme_head_result, mean_result
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.attribution.answers import results as answers
from probes.attribution.answers.schema import ANSWER_STATISTIC
from probes.attribution.schema import STATISTIC_NAME, mean_over_positions

NO_LIMITS = (-math.inf, math.inf)


def results(run: Run) -> Iterator[Result]:
    """The terms of each model's logit, and the heads with the largest and smallest contribution."""
    for label in default_models(run):
        if "attribution_parts" in run.tables:
            yield from _logit_results(run, label)
        for _, heads in heads_by_model(run.heads[run.heads["model"] == label], STATISTIC_NAME):
            yield from _head_results(run, label, heads)
    yield from answers.results(run)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's rank by direct logit attribution."""
    for statistic in (STATISTIC_NAME, ANSWER_STATISTIC):
        yield from head_ranks(run, statistic, layer, head)


def _logit_results(run: Run, label: str) -> Iterator[Result]:
    rows = _longest_rows(run, "attribution_parts", label)
    if rows.empty:
        return
    by_layer = mean_over_positions(rows, "part", "layer", "doc")
    by_document = by_layer.groupby(level=["part", "doc"]).sum().unstack("part")
    terms = by_document.drop(columns="logit").mean().to_dict()
    where = {"context_length": int(rows["context_length"].iloc[0])}
    yield mean_result("attribution.logit", by_document["logit"], model=label, where=where, details=terms)


def _head_results(run: Run, label: str, heads: pd.DataFrame) -> Iterator[Result]:
    rows = _longest_rows(run, "attribution", label)
    length = int(rows["context_length"].iloc[0])
    yield Result(
        question="attribution.raising_heads",
        value=int((heads[STATISTIC_NAME] > 0).sum()),
        n=len(heads),
        model=label,
        where={"context_length": length},
    )
    for which in ("highest", "lowest"):
        where = {"context_length": length, "which": which}
        documents, is_lowest = rows["doc"].nunique(), which == "lowest"
        yield extreme_head_result(
            "attribution.extreme", heads, STATISTIC_NAME, documents, NO_LIMITS, is_lowest, where=where
        )


def _longest_rows(run: Run, table: str, label: str) -> pd.DataFrame:
    """The rows of a model at its longest context length."""
    rows = run.table(table)
    return rows_at_longest_length(plain_types(rows[rows["model"] == label]))
