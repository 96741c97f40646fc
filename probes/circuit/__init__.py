"""Probe `circuit`: whether a set of heads answers prompts without all other heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.rendering.blocks import ChartGroup, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.circuit.run import CircuitRunner
    from probes.circuit.schema import CircuitOptions


class Circuit(Probe):
    """The declaration of the probe `circuit`."""

    name = "circuit"
    title = "Circuit of heads"
    tab = "Circuit test"
    summary = "Test a set of heads on prompts, with all other heads ablated: faithfulness, minimality, completeness."
    group = "Causes"
    order = 47
    example = "headscope circuit --model base=smollm2-135m --pairs ioi --count 8 --by span --heads L20H0,L23H3,L29H1"

    def options(self) -> type[CircuitOptions]:
        from probes.circuit.schema import CircuitOptions

        return CircuitOptions

    def runner(self) -> type[CircuitRunner]:
        from probes.circuit.run import CircuitRunner

        return CircuitRunner

    def tables(self) -> Sequence[Table]:
        from probes.circuit.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.circuit.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.circuit.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.circuit.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.circuit.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.circuit.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.circuit.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.circuit.report import charts

        return charts(context)


PROBE = Circuit()
