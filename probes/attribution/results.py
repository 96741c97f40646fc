"""Results of direct logit attribution that no score has: the terms of the logit, of the next token and of answers, and
how many heads raise that of the next token."""

from collections.abc import Iterator

import pandas as pd

from headscope.rendering.text import heads_by_model
from headscope.results.result import Result
from headscope.results.samples import mean_result
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.attribution.answers import results as answers
from probes.attribution.declaration import NEXT_TOKEN, mean_over_positions


def results(run: Run) -> Iterator[Result]:
    """The terms of each model's logit, and the number of heads that raise it."""
    for label in default_models(run):
        if "attribution_parts" in run.tables:
            yield from _logit_results(run, label)
        for _, heads in heads_by_model(run.heads[run.heads["model"] == label], NEXT_TOKEN.column):
            yield _raising_heads(run, label, heads)
    yield from answers.results(run)


def _logit_results(run: Run, label: str) -> Iterator[Result]:
    rows = _longest_rows(run, "attribution_parts", label)
    if rows.empty:
        return
    by_layer = mean_over_positions(rows, "part", "layer", "doc")
    by_document = by_layer.groupby(level=["part", "doc"]).sum().unstack("part")
    terms = by_document.drop(columns="logit").mean().to_dict()
    where = {"context_length": int(rows["context_length"].iloc[0])}
    yield mean_result("attribution.logit", by_document["logit"], model=label, where=where, details=terms)


def _raising_heads(run: Run, label: str, heads: pd.DataFrame) -> Result:
    length = int(_longest_rows(run, "attribution", label)["context_length"].iloc[0])
    return Result(
        question="attribution.raising_heads",
        value=int((heads[NEXT_TOKEN.column] > 0).sum()),
        n=len(heads),
        model=label,
        where={"context_length": length},
    )


def _longest_rows(run: Run, table: str, label: str) -> pd.DataFrame:
    """The rows of a model at its longest context length."""
    rows = run.table(table)
    return rows_at_longest_length(plain_types(rows[rows["model"] == label]))
