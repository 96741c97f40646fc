"""What a report shows of reading, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, RenderContext
from headscope.report.explorer_blocks import Passage
from headscope.report.statistic_charts import comparison_chart
from headscope.report.text import describe_extremes, head_mask
from headscope.runs.run import Run
from probes.patterns import PROBE, plots
from probes.patterns.lens import far_rows_table


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Which heads pick out one token far back, under each model, and what the strongest of them find."""
    yield ChartGroup(PROBE.title, "Which heads pick out one token far back", _far_weight_charts(context))
    yield ChartGroup(PROBE.title, "What they find there", _far_row_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Passage]:
    """The head's most telling rows, each a way into the lens."""
    if "far_reads" in run.tables and head_mask(run.table("far_reads"), layer, head).any():
        yield far_rows_table(run, model, layer, head)


def _far_weight_charts(context: RenderContext) -> Iterator[Chart]:
    scored = list(context.finite_values("far_weight"))
    for label in scored[:1]:
        yield Chart(
            head_figures.plot_matrix(context.heads, "far_weight", label),
            "A cell is a head, the first layer at the bottom. Mean over sampled rows of the largest weight on a token "
            "that is neither the first nor within 32 tokens.",
            describe_extremes(context.heads, "far_weight", label),
            half_width=True,
        )
    if len(scored) > 1:
        yield comparison_chart(context.heads, "far_weight", scored[0])


def _far_row_charts(context: RenderContext) -> Iterator[Chart]:
    for label, values in list(context.finite_values("far_weight").items())[:1]:
        best = context.heads.loc[values.sort_values().index[-3:][::-1]]
        for layer, head in best[["layer", "head"]].itertuples(index=False, name=None):
            yield _far_rows_chart(context.run, label, int(layer), int(head))


def _far_rows_chart(run: Run, model: str, layer: int, head: int) -> Chart:
    return Chart(
        plots.plot_far_rows(run, model, layer, head),
        "Of the rows that were kept, those whose weight on one far token is largest. ‹ › mark the token, among those "
        "around it.",
    )
