"""Probe `sparsity`: how few keys each head needs, and what rules that choose keys cost each head."""

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
    from probes.sparsity.run import SparsityRunner
    from probes.sparsity.schema import SparsityOptions


class Sparsity(Probe):
    """The declaration of the probe `sparsity`."""

    name = "sparsity"
    title = "Sparse attention"
    tab = "Sparsity"
    summary = "Measure how few keys each head needs, and what it loses if it attends to the keys of a rule only."
    group = "Heads"
    order = 24
    example = "headscope sparsity --model base=smollm2-135m --length 2048"

    def options(self) -> type[SparsityOptions]:
        from probes.sparsity.schema import SparsityOptions

        return SparsityOptions

    def runner(self) -> type[SparsityRunner]:
        from probes.sparsity.run import SparsityRunner

        return SparsityRunner

    def tables(self) -> Sequence[Table]:
        from probes.sparsity.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.sparsity.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.sparsity.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.sparsity.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.sparsity.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.sparsity.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.sparsity.analysis import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.sparsity.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.sparsity.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.sparsity.report import overview_cards

        return overview_cards(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.sparsity.report import head_charts

        return head_charts(run, model, layer, head)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.sparsity.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Sparsity()
