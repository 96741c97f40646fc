"""Scatter plots with one point per head (or KV group), coloured by layer; selected heads highlighted in a figure."""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import Head
from headscope.plots import axes, style
from headscope.runs.column_metadata import statistic


def has_head_points(figure: go.Figure) -> bool:
    """Whether the points of the figure are heads."""
    return bool(figure.layout.meta) and bool(figure.layout.meta.get("heads"))


def highlight_heads(figure: go.Figure, selected_heads: Collection[Head]) -> go.Figure:
    """Highlight heads in place and return the figure: cells of a matrix get a frame, other points of a scatter fade.

    Without selected heads, or if the points of the figure are not heads, the figure stays as it is.
    """
    if not selected_heads or not has_head_points(figure):
        return figure
    matrices = [trace for trace in figure.data if trace.type == "heatmap"]
    for trace in matrices:
        _frame_cells(figure, trace, selected_heads, size=12 if len(matrices) == 1 else 7)
    for trace in figure.data:
        if trace.type != "heatmap" and trace.customdata is not None:
            selected_points = [
                index
                for index, (layer, head, *_) in enumerate(trace.customdata)
                if (int(layer), int(head)) in selected_heads
            ]
            trace.selectedpoints = selected_points
            trace.unselected = {"marker": {"opacity": 0.12}}
    return figure


def _frame_cells(figure: go.Figure, trace: go.Heatmap, selected_heads: Collection[Head], size: int) -> None:
    cell_heads = np.asarray(trace.customdata)[..., :2]
    rows, columns = np.nonzero([[tuple(cell) in selected_heads for cell in row] for row in cell_heads])
    for colour, width in (("black", size * 0.4), ("white", size * 0.16)):  # visible on every colour of the scale
        figure.add_scatter(
            x=[trace.x[column] for column in columns],
            y=[trace.y[row] for row in rows],
            mode="markers",
            marker={"symbol": "square-open", "size": size, "color": colour, "line": {"width": width}},
            cliponaxis=False,
            hoverinfo="skip",
            showlegend=False,
            xaxis=trace.xaxis,
            yaxis=trace.yaxis,
        )
    for name, cells in ((trace.xaxis or "x", trace.x), (trace.yaxis or "y", trace.y)):
        axis = figure.layout[f"{name[0]}axis{name[1:]}"]
        first = (0 if isinstance(cells[0], str) else cells[0]) - 0.5
        ends = [first, first + len(cells)]  # with autorange, the axis would leave room for the frames
        axis.update(range=ends[::-1] if axis.autorange == "reversed" else ends, autorange=False)


HEAD_COLUMNS = ["layer", "head", "kv_group"]
MARKER_OUTLINE = {"color": "rgba(128,128,128,0.8)", "width": 0.7}


def plot_against_baseline(heads: pd.DataFrame, statistic_name: str, baseline: str) -> go.Figure:
    """Plot a statistic of every head under each other model against the baseline, one panel per model.

    Both axes have the same range; the dashed line is y = x; colour is the layer.
    """
    stat = statistic(statistic_name)
    title = f"{stat.title} of each head, compared with {style.escape_label(baseline)}"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    styles = style.model_styles(heads)
    measured_models = [label for label in styles if heads.loc[heads["model"] == label, statistic_name].notna().any()]
    other_models = [label for label in measured_models if label != baseline]
    if baseline not in measured_models or not other_models:
        detail = (
            f"; it was measured only for {style.escape_label(', '.join(measured_models))}" if len(styles) > 1 else ""
        )
        return style.empty_figure(title, f"a comparison needs the baseline and at least one other model{detail}")
    base = heads[heads["model"] == baseline].set_index(HEAD_COLUMNS)[statistic_name].rename("x")
    panel_titles = [styles[label].name for label in other_models]
    figure = style.panel_figure(title, panel_titles, height=360)
    for index, label in enumerate(other_models):
        points = (
            heads[heads["model"] == label]
            .set_index(HEAD_COLUMNS)[statistic_name]
            .rename("y")
            .to_frame()
            .join(base)
            .reset_index()
        )
        hover = (
            f"{style.escape_label(baseline)} %{{x:.4g}}{style.unit_suffix(stat.unit)}<br>"
            f"{styles[label].name} %{{y:.4g}}{style.unit_suffix(stat.unit)}"
        )
        add_points(figure, points, "x", "y", hover, styles[label].name, **style.panel_row_col(index, other_models))
    values = heads.loc[heads["model"].isin([baseline, *other_models]), statistic_name].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not stat.log_scale))]
    if not len(values):
        return style.empty_figure(title, "no finite values to plot")
    ends = [values.min() / 1.2, values.max() * 1.2] if stat.log_scale else [values.min(), values.max()]
    for index in range(len(other_models)):
        add_diagonal(figure, ends, **style.panel_row_col(index, other_models))
    axis = axes.log_axis(values, sparse=True) | {"range": list(np.log10(ends))} if stat.log_scale else {}
    figure.update_xaxes(axis)
    figure.update_yaxes(axis)
    unit = f" ({stat.unit})" if stat.unit else ""
    style.set_outer_axis_titles(
        figure, len(other_models), f"{style.escape_label(baseline)}{unit}", f"model above the panel{unit}"
    )
    style.set_metadata(
        figure,
        x=f"{stat.label_with_unit} under {style.escape_label(baseline)}",
        value=f"{stat.label_with_unit} under the model",
    )
    return add_layer_colorbar(figure, 74)


def add_points(
    figure: go.Figure,
    points: pd.DataFrame,
    x: str | int,
    y: str | int,
    hover: str,
    model_name: str = "",
    **panel_position: int,
) -> None:
    """Add column `y` of `points` against column `x`, one marker per row, in the panel `panel_position`.

    The hover text gives layer, head and KV group (no head where every row is a whole KV group, head -1), then `hover`.
    """
    is_kv_group = (points["head"] < 0).all()
    figure.add_scatter(
        x=points[x],
        y=points[y],
        mode="markers",
        marker={"color": points["layer"], "coloraxis": "coloraxis", "size": 6, "line": MARKER_OUTLINE},
        customdata=points[HEAD_COLUMNS].to_numpy(),
        hovertemplate=f"layer %{{customdata[0]}},{'' if is_kv_group else ' head %{customdata[1]},'} "
        f"KV group %{{customdata[2]}}<br>{hover}<extra></extra>",
        name=model_name or None,
        showlegend=False,
        **panel_position,
    )


def add_diagonal(figure: go.Figure, ends: Sequence[float], **panel_position: int) -> None:
    """Add the dashed line y = x between two ends."""
    line = {"color": style.HIGHLIGHT_COLOUR, "dash": "dash", "width": 1.3}
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", showlegend=False, **panel_position)


def add_layer_colorbar(figure: go.Figure, top_margin: int = 46) -> go.Figure:
    """Add the colour bar of the layers; `top_margin` is in px."""
    last_layer = max((max(trace.marker.color, default=0) for trace in figure.data if trace.marker.coloraxis), default=0)
    bar = {"title": {"text": "layer"}, "dtick": 1 if last_layer < 8 else None}  # no ticks at half layers
    figure.update_layout(coloraxis={"colorscale": style.SEQUENTIAL_SCALE, "colorbar": bar})
    return style.declare_head_points(style.set_top_margin(figure, top_margin))
