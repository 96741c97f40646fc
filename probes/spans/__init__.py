"""Probe `spans`: how much each head attends from one named part of a prompt to another, or to classes of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Block, Card, ChartGroup, Overview, PageContent, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.spans.run import SpansRunner
    from probes.spans.schema import SpansOptions


class Spans(Probe):
    """The declaration of the probe `spans`."""

    name = "spans"
    title = "Attention between spans"
    tab = "Spans"
    explorer_tab = "Span pairs"
    summary = "Measure how much each head attends from one named part of a prompt to another, or to classes of tokens."
    group = "Prompts"
    order = 22
    example = "headscope spans --model base=smollm2-135m --prompts prompts.jsonl --key context"

    def options(self) -> type[SpansOptions]:
        from probes.spans.schema import SpansOptions

        return SpansOptions

    def runner(self) -> type[SpansRunner]:
        from probes.spans.run import SpansRunner

        return SpansRunner

    def tables(self) -> Sequence[Table]:
        from probes.spans.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.spans.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.spans.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.spans.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.spans.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.spans.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.spans.analysis import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.spans.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.spans.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.spans.report import overview_cards

        return overview_cards(context)

    def head_card(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.spans.report import head_card

        return head_card(run, model, layer, head)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.spans.report import head_charts

        return head_charts(run, model, layer, head)

    def explorer(self, context: RenderContext, query: Mapping[str, str]) -> PageContent:
        from probes.spans.pair_explorer import pair_page

        return pair_page(context, query)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.spans.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Spans()
