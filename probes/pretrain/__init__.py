"""Probe `pretrain`: train small models from random weights that differ only in their position scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from headscope.positions.model import Model
    from headscope.rendering.blocks import ChartGroup, RenderContext
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.run import Run
    from probes.pretrain.run import PretrainRunner
    from probes.pretrain.schema import PretrainOptions


class Pretrain(Probe):
    """The declaration of the probe `pretrain`."""

    name = "pretrain"
    title = "Pretraining"
    tab = None
    summary = "Train small models from random weights under different position schemes, on the same batches."
    group = "Training"
    order = 22
    takes = ("text", "docs")
    example = "headscope pretrain --training-texts 'file:texts/**/*.txt' --text 'file:held/*.txt' --trainings rope"

    def options(self) -> type[PretrainOptions]:
        from probes.pretrain.schema import PretrainOptions

        return PretrainOptions

    def runner(self) -> type[PretrainRunner]:
        from probes.pretrain.run import PretrainRunner

        return PretrainRunner

    def questions(self) -> Sequence[Question]:
        from probes.pretrain.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.pretrain.results import results

        return results(run)

    def next_steps(self, run: Run) -> Iterable[str]:
        from probes.pretrain.results import next_steps

        return next_steps(run)

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.pretrain.report import charts

        return charts(context)

    def bench(self, model: Model, max_length: int) -> Mapping[str, Callable[[], object]]:
        from probes.pretrain.run import benchmark_variants

        return benchmark_variants(model, max_length)


PROBE = Pretrain()
