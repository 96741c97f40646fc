"""Probe `circuits`: OV and QK circuits of heads from their weights, with rotation, and composition between heads."""

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
    from probes.circuits.run import CircuitsRunner
    from probes.circuits.schema import CircuitsOptions


class Circuits(Probe):
    """The declaration of the probe `circuits`."""

    name = "circuits"
    title = "Circuits"
    tab = "Circuits"
    summary = (
        "Analyse heads' weights: OV copying, QK logits, composition, QK attribution. (circuit tests heads on prompts.)"
    )
    order = 27
    example = "headscope circuits --model base=smollm2-135m --tokens king,queen --heads L5H3"

    def options(self) -> type[CircuitsOptions]:
        from probes.circuits.schema import CircuitsOptions

        return CircuitsOptions

    def runner(self) -> type[CircuitsRunner]:
        from probes.circuits.run import CircuitsRunner

        return CircuitsRunner

    def tables(self) -> Sequence[Table]:
        from probes.circuits.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.circuits.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.circuits.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.circuits.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.circuits.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.circuits.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.circuits.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.circuits.report import charts

        return charts(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.circuits.report import head_charts

        return head_charts(run, model, layer, head)

    def row_charts(
        self, run: Run, model: str, length: int, doc: str, layer: int, head: int, query: int
    ) -> Iterable[Block]:
        from probes.circuits.report import row_charts

        return row_charts(run, model, length, doc, layer, head, query)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.circuits.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Circuits()
