"""Probe `adapt`: train AdaRoPE, and optionally a LoRA, on a frozen checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headscope.rendering.blocks import ChartGroup, RenderContext
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from probes.adapt.run import AdaptRunner
    from probes.adapt.schema import AdaptOptions


class Adapt(Probe):
    """The declaration of the probe `adapt`."""

    name = "adapt"
    title = "AdaRoPE training"
    tab = None
    summary = "Train AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head."
    group = "Training"
    order = 20
    takes = ("model", "text", "docs")
    example = "headscope adapt --model smollm2-135m --factor 8"

    def options(self) -> type[AdaptOptions]:
        from probes.adapt.schema import AdaptOptions

        return AdaptOptions

    def runner(self) -> type[AdaptRunner]:
        from probes.adapt.run import AdaptRunner

        return AdaptRunner

    def tables(self) -> Sequence[Table]:
        from probes.adapt.schema import TABLES

        return TABLES

    def questions(self) -> Sequence[Question]:
        from probes.adapt.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.adapt.results import results

        return results(run)

    def next_steps(self, run: Run) -> Iterable[str]:
        from probes.adapt.results import next_steps

        return next_steps(run)

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.adapt.report import charts

        return charts(context)


PROBE = Adapt()
