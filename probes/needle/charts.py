"""What a report shows of the needle probe, and the sentence that says how to read each chart."""

from collections.abc import Iterator, Sequence

import pandas as pd

from headscope.figures import compare
from headscope.figures import heads as head_figures
from headscope.report.content import Chart, Group, Shown
from headscope.report.words import extremes
from headscope.runs.run import Run
from probes.needle import PROBE, figures
from probes.needle.found import by_seed, seed_columns
from probes.needle.heads import retrieval_rows


def charts(shown: Shown) -> Iterator[Group]:
    """Where each model finds the needle, and which heads copy it; nothing without trials."""
    needles = shown.table("needles")
    if needles is not None:
        yield Group(PROBE.title, "Where the needle is found", _by_length(needles), page="/")
        yield Group(PROBE.title, "Where the needle is found", _success(needles, shown.models))
        yield Group(PROBE.title, "Which heads copy it", _scores(shown))


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """Where one head copies the needle."""
    if "retrieval" in run.tables:
        yield Chart(
            figures.head_map(run.derived(retrieval_rows), model, layer, head),
            "Share of the needle that this head copies while the model answers right, by length and depth.",
            half=True,
        )


def _by_length(needles: pd.DataFrame) -> Iterator[Chart]:
    mode = "strict" if "strict" in set(needles["mode"]) else "wu"
    yield Chart(
        figures.success_by_length(needles, mode),
        "Over all depths; the band is the 95 % interval of the share.",
        half=True,
    )


def _success(needles: pd.DataFrame, models: Sequence[str]) -> Iterator[Chart]:
    mode = "strict" if "strict" in set(needles["mode"]) else "wu"
    for label in models:
        yield Chart(
            figures.success_map(needles, label, mode),
            "A cell is a context length and a depth; it succeeds where the answer holds more than half of the needle's "
            "words.",
            half=True,
        )


def _scores(shown: Shown) -> Iterator[Chart]:
    """Score of every head, how scores go with growth, and how far models and haystacks agree."""
    heads = shown.heads
    with_score, with_growth = shown.finite("retrieval"), shown.finite("growth")
    scored = [label for label in shown.models if label in with_score]
    for label in scored:
        yield Chart(
            head_figures.matrix(heads, "retrieval", label),
            "Share of the needle that a head copies while the model answers right: at the step that writes a token, "
            "the head's largest weight lies on that very token of the needle.",
            extremes(heads, "retrieval", label),
            half=True,
        )
    if scored:
        yield Chart(
            figures.ranked(heads),
            "Heads above the dotted line, a score of 0.1, are called retrieval heads. Bands: 95 % interval "
            "over trials.",
            half=True,
        )
    for label in scored:
        if label in with_growth:
            yield Chart(
                figures.against_growth(heads, label),
                "A point is a head. Theory asks a retrieval head to keep its effective length: a growth exponent "
                "near 0.",
                half=True,
            )
    if len(scored) > 1:
        yield Chart(
            compare.against(heads, "retrieval", scored[0]),
            f"A point is a head. On the dashed line it copies as much as under {scored[0]}.",
        )
    scores = shown.run.derived(by_seed)
    for label in scored if len(seed_columns(scores)) > 1 else ():
        yield Chart(
            figures.between_seeds(scores, label), "The same needles in two haystacks; a point is a head.", half=True
        )
