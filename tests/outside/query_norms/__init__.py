"""A probe from outside headscope: how long are the queries of each head?"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pydantic import Field

from headscope.plots import heads as head_figures
from headscope.plugins import Probe
from headscope.report.blocks import Chart, ChartGroup, Finding, RenderContext, Term
from headscope.report.text import describe_extremes, heads_by_model
from headscope.runs.aggregation import HEAD_KEYS, plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.study.config import Options

PROBE = Probe(
    name="norms",
    title="Query norms",
    summary="How long the queries of each head are.",
    example="headscope norms --model base=smollm2-135m --length 256",
    options="query_norms:Norms",
    runner="query_norms.cells:NormsSection",
    tables="query_norms:TABLES",
    statistics="query_norms:STATISTICS",
    head_columns="query_norms:heads",
    charts="query_norms:charts",
    findings="query_norms:findings",
    glossary="query_norms:GLOSSARY",
)

TABLES = (
    Table(
        "norms",
        "how long each head's queries are",
        (MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, Column("norm", "value", "", "mean length of the queries", 0)),
    ),
)
STATISTICS = {"query_norm": Statistic("query norm", "", "mean length of the queries, over documents")}
GLOSSARY = (Term("Query norm", "The length of a query is how loudly a head asks.", tables=("norms",)),)


class Norms(Options):
    """How long are the queries?"""

    lengths: list[int] = Field([256], description="context lengths in tokens")
    power: float = Field(1.0, gt=0, description="power of the norm that is averaged")


def heads(run: RunTables) -> pd.DataFrame | None:
    if "norms" not in run.tables:
        return None
    return plain_types(run.table("norms")).groupby(HEAD_KEYS)["norm"].mean().rename("query_norm").to_frame()


def charts(shown: RenderContext) -> Iterator[ChartGroup]:
    def matrices() -> Iterator[Any]:
        for label in shown.finite_values("query_norm"):
            figure = head_figures.plot_matrix(shown.heads, "query_norm", label)
            yield Chart(figure, "A cell is a head.", describe_extremes(shown.heads, "query_norm", label))

    yield ChartGroup(PROBE.title, "Every head", matrices())


def findings(run: Run) -> Iterator[Finding]:
    for label, block in heads_by_model(run.heads, "query_norm"):
        yield Finding(PROBE.title, f"The median query of {label} is {block['query_norm'].median():.3f} long.", label)
