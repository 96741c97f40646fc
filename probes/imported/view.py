"""Report of imported scores: a matrix, and agreement with the own measures."""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.plugin_api import (
    Chart,
    ChartGroup,
    RenderContext,
    describe_extremes,
    plot_matrix,
)
from headscope.runs.column_metadata import statistic
from probes.imported import PROBE
from probes.imported.declaration import NAME, correlations


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The scores of all heads, and their plot against the measure that ranks the heads most like them."""
    yield ChartGroup(PROBE.title, "Imported score of each head", _charts(context))


def _charts(context: RenderContext) -> Iterator[Chart]:
    for label in context.finite_values(NAME):
        entry = next(entry for entry in context.run.manifest["models"] if entry["label"] == label)
        origin = " The scores belong to a model with other weights." if entry.get("other_weights") else ""
        yield Chart(
            plot_matrix(context.heads, NAME, label, context.scale_heads),
            "One cell per head; the first layer is at the bottom. Heads without a score in the file are empty."
            f"{origin}",
            describe_extremes(context.heads, NAME, label),
            half_width=True,
        )
        for row in correlations(context.heads, label).head(1).to_dict("records"):
            yield Chart(
                plot_against_measure(context.heads, NAME, row["name"], label),
                f"One point per head. Spearman's rank correlation over {row['heads']} heads: {row['correlation']:.2f}."
                f"{origin}",
                half_width=True,
            )


def plot_against_measure(heads: pd.DataFrame, imported: str, measure: str, label: str) -> go.Figure:
    """Scatter plot of the imported score of every head of the model `label` against a measure; colour is the layer."""
    stat = statistic(measure)
    title = f"Imported score against {stat.label} in {label}"
    rows = heads[heads["model"] == label]
    if reason := style.missing_data_reason(rows, imported, measure):
        return style.empty_figure(title, reason)
    points = rows.dropna(subset=[imported, measure])
    hover = f"{stat.label} %{{x:.3g}}<br>imported score %{{y:.3g}}"
    x = {"title_text": stat.label_with_unit, "type": "log" if stat.log_scale else "linear"}
    figure = shapes.head_points(title, points, (measure, imported), hover, x, "imported score")
    return style.set_metadata(figure, model=style.escape_label(label))
