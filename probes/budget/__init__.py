"""Probe `budget`: which share of the KV groups can stream, that is drop most of their cache, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Card, ChartGroup, Overview, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.budget.run import BudgetRunner
    from probes.budget.schema import BudgetOptions


class Budget(Probe):
    """The declaration of the probe `budget`."""

    name = "budget"
    title = "KV-cache budget"
    tab = "Budget"
    summary = "Let a growing share of the KV groups keep only the first and last tokens, and measure what that costs."
    order = 49
    takes = ("models", "text", "docs")
    example = "headscope budget --model base=smollm2-135m --length 2048"

    def options(self) -> type[BudgetOptions]:
        from probes.budget.schema import BudgetOptions

        return BudgetOptions

    def runner(self) -> type[BudgetRunner]:
        from probes.budget.run import BudgetRunner

        return BudgetRunner

    def tables(self) -> Sequence[Table]:
        from probes.budget.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.budget.analysis import STATISTICS

        return STATISTICS

    def model_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.budget.analysis import model_statistics

        return model_statistics(tables)

    def loss_by_kept_keys(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.budget.kept_keys import loss_by_kept_keys

        return loss_by_kept_keys(tables)

    def questions(self) -> Sequence[Question]:
        from probes.budget.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.budget.results import results

        return results(run)

    def overview(self, run: Run) -> Overview | None:
        from probes.budget.results import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.budget.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.budget.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.budget.report import overview_cards

        return overview_cards(context)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.budget.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Budget()
