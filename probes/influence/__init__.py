"""Head influence: how the loss changes when one head or KV group is reset or ablated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Card, ChartGroup, PageContent, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.influence.run import InfluenceRunner, head_influence
    from probes.influence.schema import InfluenceOptions

__all__ = ["PROBE", "head_influence"]


class Influence(Probe):
    """The declaration of the probe `influence`."""

    name = "influence"
    title = "Head influence"
    tab = "Influence"
    summary = "Measure how the loss changes when one head or KV group is reset or ablated."
    group = "Causes"
    order = 40
    example = "headscope influence --model learned=smollm2-135m@adarope:adapter=PATH --length 2048"

    def options(self) -> type[InfluenceOptions]:
        from probes.influence.schema import InfluenceOptions

        return InfluenceOptions

    def runner(self) -> type[InfluenceRunner]:
        from probes.influence.run import InfluenceRunner

        return InfluenceRunner

    def tables(self) -> Sequence[Table]:
        from probes.influence.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.influence.head_columns import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.influence.head_columns import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.influence.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.influence.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.influence.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.influence.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.influence.report import charts

        return charts(context)

    def overview_cards(self, context: RenderContext) -> Iterable[Card]:
        from probes.influence.report import overview_cards

        return overview_cards(context)

    def page(self, context: RenderContext) -> PageContent | None:
        from probes.influence.report import page

        return page(context)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.influence.bench import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Influence()


def __getattr__(name: str) -> Any:
    if name == "head_influence":  # imports torch
        from probes.influence.run import head_influence

        return head_influence
    raise AttributeError(f"module 'probes.influence' has no attribute '{name}'")
