"""Probe `imported`: scores of heads from a file of another tool, stored beside headscope's own measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.rendering.blocks import ChartGroup, RenderContext
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.imported.run import ImportedRunner
    from probes.imported.schema import ImportedOptions


class Imported(Probe):
    """The declaration of the probe `imported`."""

    name = "imported"
    title = "Imported scores"
    tab = "Imported"
    summary = (
        "Store the head scores of another tool's file with a model, to compare them with headscope's own measures."
    )
    group = "Heads"
    order = 48
    command = "import"
    function = "import_scores"
    takes = ("models",)
    example = "headscope import --model base=smollm2-135m --file scores.json"

    def options(self) -> type[ImportedOptions]:
        from probes.imported.schema import ImportedOptions

        return ImportedOptions

    def runner(self) -> type[ImportedRunner]:
        from probes.imported.run import ImportedRunner

        return ImportedRunner

    def tables(self) -> Sequence[Table]:
        from probes.imported.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.imported.schema import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.imported.schema import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.imported.results import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.imported.results import results

        return results(run)

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.imported.report import charts

        return charts(context)


PROBE = Imported()
