"""What a report shows of the detectors, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, RenderContext
from headscope.report.statistic_charts import comparison_chart
from headscope.report.text import default_models_with, describe_extremes, head_mask
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.detectors import PROBE, plots
from probes.detectors.analysis import COLUMNS


def charts(shown: RenderContext) -> Iterator[ChartGroup]:
    """Every kind of head in the first model, and against the others."""
    yield ChartGroup(PROBE.title, "What each head looks at on random tokens that come twice", _matrices(shown))
    yield ChartGroup(PROBE.title, "Under the other models", _against(shown))


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """What one head looks at, under every model and by length."""
    if "detectors" not in run.tables:
        return
    rows = run.table("detectors")
    rows = rows[head_mask(rows, layer, head)]
    if rows.empty:
        return
    yield Chart(
        plots.of_head(rows, default_models_with(run, model), layer, head),
        "Mean weight on each kind of key, on random tokens that come twice, in the longest context. Horizontal marks: "
        "what weights that are spread evenly would give. Error bars: 95 % interval over sequences.",
        half_width=True,
    )
    if rows["context_length"].nunique() > 1:
        yield Chart(
            plots.by_length(rows, model, layer, head),
            "A head that finds the earlier copy however far it is stays level.",
            half_width=True,
        )


def _matrices(shown: RenderContext) -> Iterator[Chart]:
    for name in COLUMNS.values():
        for label in list(shown.finite_values(name))[:1]:
            yield Chart(
                head_figures.plot_matrix(shown.heads, name, label),
                f"A cell is a head, the first layer at the bottom. {statistic(name).title}: {statistic(name).meaning}.",
                describe_extremes(shown.heads, name, label),
                half_width=True,
            )


def _against(shown: RenderContext) -> Iterator[Chart]:
    for name in COLUMNS.values():
        scored = list(shown.finite_values(name))
        if len(scored) > 1:
            yield comparison_chart(shown.heads, name, scored[0])
