"""Probes for tests of report and app: one that they do not know, one that fails late, and one that is broken."""

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from headscope.plots import style
from headscope.plugins import Probe
from headscope.report.blocks import Chart, ChartGroup, Overview, PageContent, RenderContext, Term, TextBlock
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.run import Run

PROBE = Probe(
    name="foreign",
    title="Foreign matters",
    tab="Foreign",
    summary="What is foreign here.",
    options="",
    runner="",
    charts="support.example_probes:charts",
    questions="support.example_probes:QUESTIONS",
    results="support.example_probes:results",
    head_charts="support.example_probes:head_charts",
    head_results="support.example_probes:head_results",
    glossary="support.example_probes:GLOSSARY",
    overview="support.example_probes:overview",
    next_steps="support.example_probes:next_steps",
    example="foreign --model [b]x[/b]",
)
LATE = replace(PROBE, name="late", title="Late matters", charts="support.example_probes:failing_charts")
"""A probe whose charts fail only when they are drawn."""
BROKEN = Probe(
    name="broken",
    title="Broken matters",
    summary="What is broken here.",
    options="",
    runner="",
    charts="support.example_probes:absent",
    results="support.example_probes:failing",
    glossary="no_such_module:GLOSSARY",
    overview="support.example_probes:failing",
)

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


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    yield ChartGroup("Foreign matters", "At home", _charts(f"At home with {context.selected_model}"))
    yield ChartGroup("Foreign matters", "Abroad", _charts("Abroad"), app_pages="/compare")


def failing_charts(context: RenderContext) -> Iterator[ChartGroup]:
    yield ChartGroup("Late matters", "", failing(context))
    yield ChartGroup("Foreign matters", "At home", _charts("Later at home"))


def results(run: Run) -> Iterator[Result]:
    yield Result(question="foreign.models", value=len(run.models))
    yield Result(question="foreign.losses")
    yield Result(question="foreign.warning", details={"danger": "[red]danger"})


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    yield from _charts(f"Foreign chart of {layer}.{head} in {model}")


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    yield Result(question="foreign.head", model=model, layer=layer, head=head)


def overview(run: Run) -> Overview:
    return Overview("foreign", pd.DataFrame({"n": [1]}))


def next_steps(run: Run) -> Iterator[str]:
    yield f"Leave: foreign {run.path}"


def page(context: RenderContext) -> PageContent:
    return PageContent("My own page", context.selected_model, {"": [TextBlock(["Drawn by myself."])]})


def failing(*arguments: object) -> Iterator[Chart]:
    yield from ()
    raise RuntimeError("out of order")


def _charts(title: str) -> Iterator[Chart]:
    yield Chart(style.empty_figure(title, "nothing"), "A foreign caption.")
