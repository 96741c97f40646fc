"""Probe `scaling`: numerical check of the scaling theorems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headscope.rendering.blocks import ChartGroup, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from probes.scaling.run import ScalingRunner
    from probes.scaling.schema import ScalingOptions


class Scaling(Probe):
    """The declaration of the probe `scaling`."""

    name = "scaling"
    title = "Scaling theorems"
    tab = "Scaling"
    summary = "Check Theorems 4 and 5 of the AdaRoPE paper numerically: effective length under a logit scale."
    group = "Training"
    order = 60
    takes = ()
    example = "headscope scaling"

    def options(self) -> type[ScalingOptions]:
        from probes.scaling.schema import ScalingOptions

        return ScalingOptions

    def runner(self) -> type[ScalingRunner]:
        from probes.scaling.run import ScalingRunner

        return ScalingRunner

    def tables(self) -> Sequence[Table]:
        from probes.scaling.schema import TABLES

        return TABLES

    def questions(self) -> Sequence[Question]:
        from probes.scaling.results import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.scaling.results import results

        return results(run)

    def glossary(self) -> Sequence[Term]:
        from probes.scaling.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.scaling.report import charts

        return charts(context)


PROBE = Scaling()
