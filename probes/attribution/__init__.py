"""Direct logit attribution: what each head adds to the logit of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.positions.model import Model
    from headscope.rendering.blocks import Block, ChartGroup, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.attribution.run import AttributionRunner
    from probes.attribution.schema import AttributionOptions


class Attribution(Probe):
    """The declaration of the probe `attribution`."""

    name = "attribution"
    title = "Direct logit attribution"
    tab = "Attribution"
    summary = (
        "Measure direct logit attribution (DLA): what each head, MLP and bias adds to the logit of the next token or "
        "of an answer."
    )
    group = "Causes"
    order = 28
    example = "headscope attribution --model base=smollm2-135m --length 2048"

    def options(self) -> type[AttributionOptions]:
        from probes.attribution.schema import AttributionOptions

        return AttributionOptions

    def runner(self) -> type[AttributionRunner]:
        from probes.attribution.run import AttributionRunner

        return AttributionRunner

    def tables(self) -> Sequence[Table]:
        from probes.attribution.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.attribution.schema import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.attribution.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.attribution.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.attribution.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.attribution.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.attribution.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.attribution.report import charts

        return charts(context)

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterable[Block]:
        from probes.attribution.report import head_charts

        return head_charts(run, model, layer, head)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.attribution.run import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Attribution()
