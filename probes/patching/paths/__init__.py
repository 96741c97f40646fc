"""Probe `paths`: effects of paths between heads on the answer, by path patching between two prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headscope.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headscope.rendering.blocks import ChartGroup, Overview, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from probes.patching.paths.run import PathsRunner
    from probes.patching.paths.schema import PathsOptions


class Paths(Probe):
    """The declaration of the probe `paths`."""

    name = "paths"
    title = "Path patching"
    tab = "Paths"
    summary = (
        "Measure the effect of single paths on the answer by path patching: from a head to a later head or to the "
        "logits."
    )
    group = "Causes"
    order = 45
    example = "headscope paths --model base=smollm2-135m --pairs ioi --count 8"

    def options(self) -> type[PathsOptions]:
        from probes.patching.paths.schema import PathsOptions

        return PathsOptions

    def runner(self) -> type[PathsRunner]:
        from probes.patching.paths.run import PathsRunner

        return PathsRunner

    def tables(self) -> Sequence[Table]:
        from probes.patching.paths.schema import TABLES

        return TABLES

    def questions(self) -> Sequence[Question]:
        from probes.patching.paths.questions import QUESTIONS

        return QUESTIONS

    def results(self, run: Run) -> Iterable[Result]:
        from probes.patching.paths.results import results

        return results(run)

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterable[Result]:
        from probes.patching.paths.results import head_results

        return head_results(run, model, layer, head)

    def overview(self, run: Run) -> Overview | None:
        from probes.patching.paths.results import overview

        return overview(run)

    def glossary(self) -> Sequence[Term]:
        from probes.patching.paths.report import GLOSSARY

        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterable[ChartGroup]:
        from probes.patching.paths.report import charts

        return charts(context)


PROBE = Paths()
