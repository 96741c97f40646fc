"""Measuring models over texts: attention, rotary pairs, distances and loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.rendering.blocks import Block, Card, ChartGroup, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Role, Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.measure.run import MeasureRunner
    from probes.measure.schema import MeasureOptions


class Measure(Probe):
    """The declaration of the probe `measure`."""

    name = "measure"
    title = "Measures"
    tab = None
    group = "Heads"
    summary = "Measure models over texts: effective length, rotary pairs, distance profiles, loss by position."
    order = 10
    command = "run"
    example = "headscope run --model base=smollm2-135m --model yarn=smollm2-135m@yarn:factor=8 --length 2048"

    def options(self) -> type[MeasureOptions]:
        from probes.measure.schema import MeasureOptions

        return MeasureOptions

    def runner(self) -> type[MeasureRunner]:
        from probes.measure.run import MeasureRunner

        return MeasureRunner

    def tables(self) -> Sequence[Table]:
        from probes.measure.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.measure.schema import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.measure.analysis import head_statistics

        return head_statistics(tables)

    def model_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.measure.analysis import model_statistics

        return model_statistics(tables)

    def roles(self) -> Mapping[str, Role]:
        from probes.measure.analysis import ROLES

        return ROLES

    def questions(self) -> Sequence[Question]:
        from probes.measure.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.measure.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.measure.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.measure.glossary import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.measure.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.measure.cards import overview_cards

        return overview_cards(context)

    def page_cards(self, context: RenderContext, page: str) -> Iterable[Card]:
        from probes.measure.cards import page_cards

        return page_cards(context, page)

    def head_card(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.measure.report import head_card

        return head_card(run, model, layer, head)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.measure.report import head_charts

        return head_charts(run, model, layer, head)


PROBE = Measure()
