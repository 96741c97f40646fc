"""What a report shows of the detectors, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, RenderContext
from headscope.report.statistic_charts import comparison_chart
from headscope.report.text import default_models_with, describe_extremes, head_mask
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.detectors import PROBE, plots
from probes.detectors.analysis import KIND_COLUMNS


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Every kind of head in the first model, and against the others."""
    yield ChartGroup(PROBE.title, "What each head looks at on random tokens that come twice", _matrix_charts(context))
    yield ChartGroup(PROBE.title, "Under the other models", _comparison_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """What one head looks at, under every model and by length."""
    if "detectors" not in run.tables:
        return
    rows = run.table("detectors")
    rows = rows[head_mask(rows, layer, head)]
    if rows.empty:
        return
    yield Chart(
        plots.plot_head_scores(rows, default_models_with(run, model), layer, head),
        "Mean weight on each kind of key, on random tokens that come twice, in the longest context. Horizontal marks: "
        "what weights that are spread evenly would give. Error bars: 95 % interval over sequences.",
        half_width=True,
    )
    if rows["context_length"].nunique() > 1:
        yield Chart(
            plots.plot_scores_by_length(rows, model, layer, head),
            "A head that finds the earlier copy however far it is stays level.",
            half_width=True,
        )


def _matrix_charts(context: RenderContext) -> Iterator[Chart]:
    for name in KIND_COLUMNS.values():
        for label in list(context.finite_values(name))[:1]:
            yield Chart(
                head_figures.plot_matrix(context.heads, name, label),
                f"A cell is a head, the first layer at the bottom. {statistic(name).title}: {statistic(name).meaning}.",
                describe_extremes(context.heads, name, label),
                half_width=True,
            )


def _comparison_charts(context: RenderContext) -> Iterator[Chart]:
    for name in KIND_COLUMNS.values():
        scored = list(context.finite_values(name))
        if len(scored) > 1:
            yield comparison_chart(context.heads, name, scored[0])
