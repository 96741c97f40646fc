"""Probe `weights`: OV and QK circuits of heads from their weights, with rotation, and composition between heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Block, ChartGroup, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.weights.run import WeightsRunner
    from probes.weights.schema import WeightsOptions


class Weights(Probe):
    """The declaration of the probe `weights`."""

    name = "weights"
    title = "OV and QK circuits, composition"
    tab = "Weights"
    summary = "Analyse heads' weights: OV copying, QK logits, composition, QK attribution."
    order = 27
    example = "headscope weights --model base=smollm2-135m --tokens king,queen --heads L5H3"

    def options(self) -> type[WeightsOptions]:
        from probes.weights.schema import WeightsOptions

        return WeightsOptions

    def runner(self) -> type[WeightsRunner]:
        from probes.weights.run import WeightsRunner

        return WeightsRunner

    def tables(self) -> Sequence[Table]:
        from probes.weights.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.weights.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.weights.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.weights.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.weights.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.weights.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.weights.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.weights.report import charts

        return charts(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.weights.report import head_charts

        return head_charts(run, model, layer, head)

    def row_charts(
        self, run: Run, model: str, length: int, doc: str, layer: int, head: int, query: int
    ) -> Iterable[Block]:
        from probes.weights.report import row_charts

        return row_charts(run, model, length, doc, layer, head, query)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.weights.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Weights()
