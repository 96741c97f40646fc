"""Probe `window`: which rotary frequencies one head needs to retrieve a needle from a window of distances."""

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
    from probes.window.run import WindowRunner
    from probes.window.schema import WindowOptions


class Window(Probe):
    """The declaration of the probe `window`."""

    name = "window"
    title = "Needle retrieval from a window"
    tab = "Window"
    summary = "Train one-head toy models to retrieve a needle from a window, with fixed, learned, partial or no RoPE."
    group = "Training"
    order = 50
    takes = ()
    example = "headscope window"

    def options(self) -> type[WindowOptions]:
        from probes.window.schema import WindowOptions

        return WindowOptions

    def runner(self) -> type[WindowRunner]:
        from probes.window.run import WindowRunner

        return WindowRunner

    def tables(self) -> Sequence[Table]:
        from probes.window.schema import TABLES

        return TABLES

    def questions(self) -> Sequence[Question]:
        from probes.window.results import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.window.results import results

        return results(run)

    def glossary(self) -> Sequence[Term]:
        from probes.window.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.window.report import charts

        return charts(context)


PROBE = Window()
