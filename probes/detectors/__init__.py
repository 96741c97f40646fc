"""Probe `detectors`: heads that attend to the previous token, the first token, a duplicate, or the token after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Block, Card, ChartGroup, Overview, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Role, Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.detectors.run import DetectorsRunner
    from probes.detectors.schema import DetectorsOptions


class Detectors(Probe):
    """The declaration of the probe `detectors`."""

    name = "detectors"
    title = "Head detectors"
    tab = "Detectors"
    summary = "Score heads as previous-token, current-token, first-token, duplicate-token and induction heads."
    group = "Heads"
    order = 25
    takes = ("models",)
    example = "headscope detectors --model base=smollm2-135m --period 128,512 --sequences 8"

    def options(self) -> type[DetectorsOptions]:
        from probes.detectors.schema import DetectorsOptions

        return DetectorsOptions

    def runner(self) -> type[DetectorsRunner]:
        from probes.detectors.run import DetectorsRunner

        return DetectorsRunner

    def tables(self) -> Sequence[Table]:
        from probes.detectors.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.detectors.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.detectors.analysis import head_statistics

        return head_statistics(tables)

    def model_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.detectors.analysis import model_statistics

        return model_statistics(tables)

    def roles(self) -> Mapping[str, Role]:
        from probes.detectors.analysis import ROLES

        return ROLES

    def questions(self) -> Sequence[Question]:
        from probes.detectors.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.detectors.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.detectors.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.detectors.analysis import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.detectors.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.detectors.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.detectors.report import overview_cards

        return overview_cards(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.detectors.report import head_charts

        return head_charts(run, model, layer, head)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.detectors.run import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Detectors()
