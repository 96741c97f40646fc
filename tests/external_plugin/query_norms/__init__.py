"""An example of a probe from another package: the mean length of each head's queries."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

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
    mean_with_interval,
    plain_types,
    plot_matrix,
    rows_at_longest_length,
)

if TYPE_CHECKING:
    from query_norms.run import NormRunner

TABLES = (
    Table(
        "norms",
        "mean length of each head's queries",
        (MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, Column("norm", "value", "", "mean length of the queries", 0)),
    ),
)


class NormOptions(Options):
    """Options of the probe `norms`."""

    lengths: Lengths = Field(default=[256], description="context lengths in tokens")
    power: float = Field(default=1.0, gt=0, description="power of the norm that is averaged")


class Norms(Probe):
    """The declaration: its methods lead to the parts of the probe. `runner` imports torch, so it imports on use."""

    name = "norms"
    title = "Query norms"
    summary = "Measure the mean length of each head's queries."
    example = "headscope norms --model base=smollm2-135m --length 256"

    def options(self) -> type[NormOptions]:
        return NormOptions

    def runner(self) -> "type[NormRunner]":
        from query_norms.run import NormRunner

        return NormRunner

    def tables(self) -> Sequence[Table]:
        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        return {"query_norm": Statistic("query norm", "", "mean length of the queries at the longest context")}

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        if "norms" not in tables.tables:
            return None
        norms = rows_at_longest_length(plain_types(tables.table("norms"))).set_index([*HEAD_KEYS, "doc"])["norm"]
        return mean_with_interval(norms, "query_norm", low=0)

    def questions(self) -> Sequence[Question]:
        sentence = "the median query norm of {model} is {value}"
        return [Question(name="norms.median", sentence=sentence, number=".3f", level="headline")]

    def results(self, run: Run) -> Iterator[Result]:
        for label, heads in heads_by_model(run.heads, "query_norm"):
            yield Result(question="norms.median", model=label, value=heads["query_norm"].median(), n=len(heads))

    def glossary(self) -> Sequence[Term]:
        return [Term("Query norm", "The length of a query vector, which scales the logits.", tables=("norms",))]

    def charts(self, context: RenderContext) -> Iterator[ChartGroup]:
        yield ChartGroup(self.title, "All heads", _matrices(context))


PROBE = Norms()


def _matrices(context: RenderContext) -> Iterator[Chart]:
    for label in context.finite_values("query_norm"):
        figure = plot_matrix(context.heads, "query_norm", label)
        yield Chart(figure, "One cell per head.", describe_extremes(context.heads, "query_norm", label))
