"""Probes for tests of report and app: one that they do not know, one that fails late, and one that is broken."""

from collections.abc import Iterator, Sequence

import pandas as pd

from headscope.plots import style
from headscope.probe import Probe
from headscope.rendering.blocks import Chart, ChartGroup, Overview, PageContent, RenderContext, Term, TextBlock
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.run import Run

GLOSSARY = (
    Term("Foreignness", "How foreign a head is.", "F = 1"),
    Term("Needle of elsewhere", "Of a table that no run has.", tables=("elsewhere",)),
    Term("Head", "Said by another probe already."),
)

QUESTIONS = (
    Question(name="foreign.models", sentence="there are {value} models", number=".0f"),
    Question(name="foreign.losses", sentence="foreign losses are like ours", topic="Loss"),
    Question(name="foreign.warning", sentence="foreign {danger}", level="warning"),
    Question(name="foreign.head", sentence="foreign to {model}: {unit}"),
)


class Foreign(Probe):
    """A probe that report and app do not know."""

    name = "foreign"
    title = "Foreign matters"
    tab = "Foreign"
    summary = "What is foreign here."
    example = "foreign --model [b]x[/b]"

    def questions(self) -> Sequence[Question]:
        return QUESTIONS

    def glossary(self) -> Sequence[Term]:
        return GLOSSARY

    def charts(self, context: RenderContext) -> Iterator[ChartGroup]:
        yield ChartGroup("Foreign matters", "At home", _charts(f"At home with {context.selected_model}"))
        yield ChartGroup("Foreign matters", "Abroad", _charts("Abroad"), app_pages="/compare")

    def results(self, run: Run) -> Iterator[Result]:
        yield Result(question="foreign.models", value=len(run.models))
        yield Result(question="foreign.losses")
        yield Result(question="foreign.warning", details={"danger": "[red]danger"})

    def head_charts(self, run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
        yield from _charts(f"Foreign chart of {layer}.{head} in {model}")

    def head_results(self, run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
        yield Result(question="foreign.head", model=model, layer=layer, head=head)

    def overview(self, run: Run) -> Overview:
        return Overview("foreign", pd.DataFrame({"n": [1]}))

    def next_steps(self, run: Run) -> Iterator[str]:
        yield f"Leave: foreign {run.path}"


class Late(Foreign):
    """A probe whose charts fail only when they are drawn."""

    name = "late"
    title = "Late matters"

    def charts(self, context: RenderContext) -> Iterator[ChartGroup]:
        yield ChartGroup("Late matters", "", failing(context))
        yield ChartGroup("Foreign matters", "At home", _charts("Later at home"))


class WithPage(Foreign):
    """A probe with a page of its own."""

    def page(self, context: RenderContext) -> PageContent:
        return PageContent("My own page", context.selected_model, {"": [TextBlock(["Drawn by myself."])]})


class WithoutTab(Foreign):
    """A probe without a page in the app."""

    tab = None


class Torn(Foreign):
    """A probe whose page fails."""

    name = "torn"
    tab = "Torn"

    def page(self, context: RenderContext) -> PageContent:
        raise RuntimeError("out of order")


class Broken(Probe):
    """A probe that fails wherever it can."""

    name = "broken"
    title = "Broken matters"
    summary = "What is broken here."

    def charts(self, context: RenderContext) -> Iterator[ChartGroup]:
        from support.example_probes import absent

        return absent(context)

    def results(self, run: Run) -> Iterator[Result]:
        yield from ()
        raise RuntimeError("out of order")

    def glossary(self) -> Sequence[Term]:
        from no_such_module import GLOSSARY

        return GLOSSARY

    def overview(self, run: Run) -> Overview:
        raise RuntimeError("out of order")


def failing(*arguments: object) -> Iterator[Chart]:
    yield from ()
    raise RuntimeError("out of order")


def _charts(title: str) -> Iterator[Chart]:
    yield Chart(style.empty_figure(title, "nothing"), "A foreign caption.")
