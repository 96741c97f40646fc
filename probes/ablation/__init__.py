"""Probe `ablation`: how the answer to a prompt changes when heads are ablated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd

    from headscope.rendering.blocks import ChartGroup, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.column_metadata import Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from probes.ablation.run import AblationRunner
    from probes.ablation.schema import AblationOptions


class Ablation(Probe):
    """The declaration of the probe `ablation`."""

    name = "ablation"
    title = "Ablation on prompts"
    tab = "Ablation"
    summary = "Measure how the answer to a prompt changes when heads are ablated."
    group = "Causes"
    order = 46
    command = "ablate"
    function = "ablate"
    takes = ("models", "text", "docs")
    example = "headscope ablate --model base=smollm2-135m --prompt 'The capital of France is' --answer ' Paris'"

    def options(self) -> type[AblationOptions]:
        from probes.ablation.schema import AblationOptions

        return AblationOptions

    def runner(self) -> type[AblationRunner]:
        from probes.ablation.run import AblationRunner

        return AblationRunner

    def tables(self) -> Sequence[Table]:
        from probes.ablation.schema import TABLES

        return TABLES

    def statistics(self) -> Mapping[str, Statistic]:
        from probes.ablation.analysis import STATISTICS

        return STATISTICS

    def head_columns(self, tables: RunTables) -> pd.DataFrame | None:
        from probes.ablation.analysis import head_statistics

        return head_statistics(tables)

    def questions(self) -> Sequence[Question]:
        from probes.ablation.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.ablation.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.ablation.results import head_results

        return head_results(run, model, layer, head)

    def glossary(self) -> Sequence[Term]:
        from probes.ablation.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.ablation.report import charts

        return charts(context)


PROBE = Ablation()
