"""What a report shows of reading, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.figures import heads as head_figures
from headscope.report.content import Chart, Group, Shown
from headscope.report.exploring import Passage
from headscope.report.statistic_charts import against_chart
from headscope.report.words import extremes, here
from headscope.runs.run import Run
from probes.reads import PROBE, figures
from probes.reads.lens import found_far_back


def charts(shown: Shown) -> Iterator[Group]:
    """Which heads pick out one token far back, under each model, and what the strongest of them find."""
    yield Group(PROBE.title, "Which heads pick out one token far back", _far(shown))
    yield Group(PROBE.title, "What they find there", _found(shown))


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[Passage]:
    """The head's most telling rows, each a way into the lens."""
    if "far_reads" in run.tables and here(run.table("far_reads"), layer, head).any():
        yield found_far_back(run, model, layer, head)


def _far(shown: Shown) -> Iterator[Chart]:
    scored = list(shown.finite("far_weight"))
    for label in scored[:1]:
        yield Chart(
            head_figures.matrix(shown.heads, "far_weight", label),
            "A cell is a head, the first layer at the bottom. Mean over sampled rows of the largest weight on a token "
            "that is neither the first nor within 32 tokens.",
            extremes(shown.heads, "far_weight", label),
            half=True,
        )
    if len(scored) > 1:
        yield against_chart(shown.heads, "far_weight", scored[0])


def _found(shown: Shown) -> Iterator[Chart]:
    for label, values in list(shown.finite("far_weight").items())[:1]:
        best = shown.heads.loc[values.sort_values().index[-3:][::-1]]
        for layer, head in best[["layer", "head"]].itertuples(index=False, name=None):
            yield _rows(shown.run, label, int(layer), int(head))


def _rows(run: Run, model: str, layer: int, head: int) -> Chart:
    return Chart(
        figures.telling_rows(run, model, layer, head),
        "Of the rows that were kept, those whose weight on one far token is largest. ‹ › mark the token, among those "
        "around it.",
    )
