"""Probe `patching`: effects of heads on the answer, by activation patching between a clean and a corrupted prompt."""

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
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.patching.run import PatchingRunner
    from probes.patching.schema import PatchingOptions


class Patching(Probe):
    """The declaration of the probe `patching`."""

    name = "patching"
    title = "Activation patching"
    tab = "Patching"
    summary = "Measure each head's effect on the answer by activation patching between two prompts."
    group = "Causes"
    order = 45
    command = "patch"
    function = "patch"
    example = "headscope patch --model base=smollm2-135m --pairs ioi --count 8"

    def options(self) -> type[PatchingOptions]:
        from probes.patching.schema import PatchingOptions

        return PatchingOptions

    def runner(self) -> type[PatchingRunner]:
        from probes.patching.run import PatchingRunner

        return PatchingRunner

    def tables(self) -> Sequence[Table]:
        from probes.patching.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.patching.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.patching.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.patching.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.patching.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.patching.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.patching.results import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.patching.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.patching.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.patching.report import overview_cards

        return overview_cards(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.patching.report import head_charts

        return head_charts(run, model, layer, head)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.patching.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Patching()
