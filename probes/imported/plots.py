"""Plot of imported scores against a measure of headscope."""

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import head_scatter, style
from headscope.runs.column_metadata import statistic


def plot_against_measure(heads: pd.DataFrame, imported: str, measure: str, label: str) -> go.Figure:
    """Scatter plot of the imported score of every head of the model `label` against a measure; colour is the layer."""
    stat = statistic(measure)
    title = f"Imported score against {stat.label} in {label}"
    rows = heads[heads["model"] == label]
    if reason := style.missing_data_reason(rows, imported, measure):
        return style.empty_figure(title, reason)
    points = rows.dropna(subset=[imported, measure])
    figure = style.new_figure(title)
    head_scatter.add_points(figure, points, measure, imported, f"{stat.label} %{{x:.3g}}<br>imported score %{{y:.3g}}")
    figure.update_xaxes(title_text=stat.label_with_unit, type="log" if stat.log_scale else "linear")
    figure.update_yaxes(title_text="imported score")
    return style.set_metadata(head_scatter.add_layer_colorbar(figure), model=style.escape_label(label))
