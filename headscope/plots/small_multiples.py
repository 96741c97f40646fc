"""The same chart of several models as panels of one figure, with shared axes and one colour scale."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import plotly.graph_objects as go

from headscope.plots import style
from headscope.plots.line_ends import LINE_END

COLUMNS = 4
"""Panels in a row."""
MAX_PANEL_HEIGHT = 420
"""Largest height of a row of panels, in px."""
EXTREME = re.compile("<br>(max|min) .*|^<br>")
"""What a colour bar says about one model."""
AXIS_SETTINGS = (
    *("type", "range", "autorange", "rangemode", "tickmode", "tickvals", "ticktext", "dtick", "tickformat"),
    *("showgrid", "showline", "categoryorder", "categoryarray"),
)
"""Settings of an axis that all panels take from the first chart."""


def have_equal_axes(figures: Iterable[go.Figure]) -> bool:
    """Whether the figures that have data have the same ticks, and their matrices the same rows and columns."""
    axes = {
        (
            *(tuple(axis.tickvals or ()) for axis in (figure.layout.xaxis, figure.layout.yaxis)),
            *((tuple(trace.x), tuple(trace.y)) for trace in figure.data if trace.type == "heatmap"),
        )
        for figure in figures
        if figure.data
    }
    return len(axes) < 2


def small_multiples(title: str, figures: Mapping[str, go.Figure]) -> go.Figure:
    """One panel per figure, in order, under the label of its model. Figures have one panel and equal axes.

    A figure without data leaves its reason in its panel. The colour scale is that of the first matrix or scatter; it is
    the same in all, because the figures of one statistic share a scale.
    """
    labels = [style.escape_label(label, 22) for label in figures]
    height = min(MAX_PANEL_HEIGHT, max(int(figure.layout.height) for figure in figures.values()))
    combined = style.panel_figure(style.escape_label(title, 200), labels, COLUMNS, height)
    annotations, shapes, named = [*combined.layout.annotations], [], set[str]()
    for index, (label, figure) in enumerate(figures.items()):
        place, number = style.panel_row_col(index, labels, COLUMNS), str(index + 1) if index else ""
        for trace in figure.data:
            if trace.type == "heatmap":
                trace = _share_colours(combined, trace).update(name=labels[index])
            shows_name = bool(trace.name) and trace.showlegend is not False and trace.type != "heatmap"
            trace.update(meta=label, showlegend=shows_name and trace.name not in named)
            named |= {trace.name} if shows_name else set()
            combined.add_trace(trace, **place)
        if figure.layout.coloraxis.colorscale and not combined.layout.coloraxis.colorscale:
            combined.layout.coloraxis = figure.layout.coloraxis
        annotations += [_in_panel(one, number) for one in figure.layout.annotations if one.name != LINE_END]
        shapes += [_in_panel(one, number) for one in figure.layout.shapes]
    drawn = next((figure for figure in figures.values() if figure.data), None)
    combined.layout.annotations, combined.layout.shapes = annotations, shapes
    if drawn is None:
        return combined
    x_axis, y_axis = drawn.layout.xaxis, drawn.layout.yaxis
    combined.update_xaxes({name: x_axis[name] for name in AXIS_SETTINGS if x_axis[name] is not None})
    combined.update_yaxes({name: y_axis[name] for name in AXIS_SETTINGS if y_axis[name] is not None})
    style.set_outer_axis_titles(combined, len(labels), x_axis.title.text or "", y_axis.title.text or "", COLUMNS)
    metadata = {name: value for name, value in (drawn.layout.meta or {}).items() if name != "model"}
    combined.update_xaxes(tickfont_size=10, title_font_size=11)
    if x_axis.type == "category" and len(labels) >= COLUMNS:
        combined.update_xaxes(dtick=2 * (x_axis.dtick or 1))  # a panel is narrow
    combined.update_layout(showlegend=bool(named), barmode=drawn.layout.barmode)
    style.fit_legend(combined) if named else style.set_top_margin(combined, 74)
    return style.set_metadata(combined, **metadata)


def _share_colours(combined: go.Figure, trace: go.Heatmap) -> go.Heatmap:
    """The trace on the figure's common colour axis, which the first one sets."""
    if not combined.layout.coloraxis.colorscale:
        scale = {"colorscale": trace.colorscale, "cmin": trace.zmin, "cmax": trace.zmax}
        combined.layout.coloraxis = {**scale, "colorbar": trace.colorbar.to_plotly_json()}
        if texts := trace.colorbar.ticktext:  # marked cells state the extremes of their own model
            combined.layout.coloraxis.colorbar.ticktext = [EXTREME.sub("", text) for text in texts]
    return trace.update(coloraxis="coloraxis", colorscale=None, colorbar=None, zmin=None, zmax=None)


def _in_panel(item: go.layout.Annotation | go.layout.Shape, number: str) -> dict[str, object]:
    """An annotation or a shape of a single chart, moved to the panel of this number."""
    moved: dict[str, Any] = item.to_plotly_json()
    for axis in ("x", "y"):
        reference = str(moved.get(f"{axis}ref", axis))
        if reference == "paper":
            moved[f"{axis}ref"] = f"{axis}{number} domain"
        else:
            moved[f"{axis}ref"] = f"{axis}{number}{reference[1:]}"
    return moved
