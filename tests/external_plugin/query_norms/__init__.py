"""An example of a probe from another package: the mean length of each head's queries."""

from collections.abc import Iterator

import pandas as pd
from pydantic import Field

from headscope.plugin_api import (
    DOC,
    GROUP,
    HEAD,
    HEAD_KEYS,
    LAYER,
    LENGTH,
    MODEL,
    Chart,
    ChartGroup,
    Column,
    Lengths,
    Options,
    Probe,
    Question,
    RenderContext,
    Result,
    Run,
    RunTables,
    Statistic,
    Table,
    Term,
    describe_extremes,
    heads_by_model,
    plain_types,
    plot_matrix,
)

PROBE = Probe(
    name="norms",
    title="Query norms",
    summary="Measure the mean length of each head's queries.",
    example="headscope norms --model base=smollm2-135m --length 256",
    options="query_norms:NormOptions",
    runner="query_norms.run:NormRunner",
    tables="query_norms:TABLES",
    statistics="query_norms:STATISTICS",
    head_columns="query_norms:head_columns",
    charts="query_norms:charts",
    questions="query_norms:QUESTIONS",
    results="query_norms:results",
    glossary="query_norms:GLOSSARY",
)

TABLES = (
    Table(
        "norms",
        "mean length of each head's queries",
        (MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, Column("norm", "value", "", "mean length of the queries", 0)),
    ),
)
STATISTICS = {"query_norm": Statistic("query norm", "", "mean length of the queries, over documents")}
GLOSSARY = (Term("Query norm", "The length of a query vector, which scales the logits.", tables=("norms",)),)
QUESTIONS = (Question(name="norms.median", sentence="the median query norm of {model} is {value}", number=".3f"),)


class NormOptions(Options):
    """Options of the probe `norms`."""

    lengths: Lengths = Field(default=[256], description="context lengths in tokens")
    power: float = Field(default=1.0, gt=0, description="power of the norm that is averaged")


def head_columns(run: RunTables) -> pd.DataFrame | None:
    if "norms" not in run.tables:
        return None
    return plain_types(run.table("norms")).groupby(HEAD_KEYS)["norm"].mean().rename("query_norm").to_frame()


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    yield ChartGroup(PROBE.title, "All heads", _matrices(context))


def _matrices(context: RenderContext) -> Iterator[Chart]:
    for label in context.finite_values("query_norm"):
        figure = plot_matrix(context.heads, "query_norm", label)
        yield Chart(figure, "One cell per head.", describe_extremes(context.heads, "query_norm", label))


def results(run: Run) -> Iterator[Result]:
    for label, heads in heads_by_model(run.heads, "query_norm"):
        yield Result(question="norms.median", model=label, value=heads["query_norm"].median(), n=len(heads))
