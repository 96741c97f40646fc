"""The shapes of most charts: lines, lines with bands, bars, a point per head, and matrices.

Data are tables, whose index is the x axis. Columns that a shape does not name are properties of the plotly trace, such
as `text` or `customdata`. An axis is its title, or the plotly settings of the axis. Without an `<extra>`, the hover
text ends with the name of the line or bar.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, head_scatter, style
from headscope.plots.style import ModelStyle
from headscope.runs.aggregation import confidence_interval

Axis = str | Mapping[str, Any]
NAME = "%{fullData.name}"
"""The name of a line or bar in a hover text."""
Series = Mapping[ModelStyle, pd.DataFrame]
"""A table for each line or group of bars."""


def lines(
    title: style.Title, curves: Series, hover: str, x: Axis, y: Axis, *, height: int = 380, level: float | None = None
) -> go.Figure:
    """Lines of column `y`, with error bars from `low` to `high`; a dotted line at `level`."""
    figure = _with_level(style.new_figure(title, height), level)
    for line_style, curve in curves.items():
        figure.add_traces([line_trace(line_style, curve, hover)])
    return finish(figure, x, y)


def bands(
    title: style.Title,
    curves: Series,
    hover: str,
    x: Axis,
    y: Axis,
    *,
    height: int = 380,
    level: float | None = None,
    level_name: str = "",
) -> go.Figure:
    """Lines of column `mean`, with bands from `low` to `high` where these are finite; a dotted line at `level`."""
    figure = _with_level(style.new_figure(title, height), level, level_name)
    for line_style, curve in curves.items():
        style.add_line_with_band(figure, curve, line_style, hover)
    return finish(figure, x, y)


def bars(
    title: style.Title,
    series: Series,
    hover: str,
    x: Axis,
    y: Axis,
    *,
    barmode: str = "",
    top_margin: int | None = None,
) -> go.Figure:
    """Bars of column `y`, with error bars from `low` to `high`; `opacity` is that of each bar.

    With a `top_margin` (px), there is no legend.
    """
    figure = style.new_figure(title)
    for bar_style, table in series.items():
        figure.add_traces([bar_trace(bar_style, table, hover)])
    label_axes(figure, x, y)
    if barmode:
        figure.update_layout(barmode=barmode)
    return style.fit_legend(figure) if top_margin is None else style.set_top_margin(figure, top_margin)


def head_points(
    title: style.Title,
    points: pd.DataFrame,
    columns: tuple[str | int, str | int],
    hover: str,
    x: Axis,
    y: Axis,
    *,
    diagonal: tuple[float, float] | None = None,
    level: float | None = None,
    top_margin: int = 46,
) -> go.Figure:
    """A point per head or KV group, coloured by layer; dashed: y = x between the ends of `diagonal`."""
    figure = style.new_figure(title)
    head_scatter.add_points(figure, points, *columns, hover)
    if diagonal is not None:
        head_scatter.add_diagonal(figure, diagonal)
    label_axes(_with_level(figure, level), x, y)
    return head_scatter.add_layer_colorbar(figure, top_margin)


def matrix(
    title: style.Title,
    grid: pd.DataFrame,
    hover: str,
    x: Axis,
    y: Axis,
    *,
    unit: str = "",
    height: int = 380,
    top_margin: int = 46,
    gaps: bool = True,
    **cells: Any,
) -> go.Figure:
    """A heatmap of a grid with the labels of its columns and rows; `cells` are further plotly settings of it."""
    figure = style.new_figure(title, height)
    labels = {"x": grid.columns.tolist(), "y": grid.index.tolist()}
    colours = {"colorscale": style.SEQUENTIAL_SCALE, "colorbar": {"title": {"text": unit}}}
    settings = {"z": grid.to_numpy(), "hovertemplate": f"{hover}<extra></extra>"} | (
        {"xgap": 1, "ygap": 1} if gaps else {}
    )
    figure.add_traces([{"type": "heatmap", **labels, **colours, **settings, **cells}])
    return style.set_top_margin(label_axes(figure, x, y), top_margin)


def mean_curve(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over the columns of a table with its 95 % confidence interval: columns mean, low and high."""
    values = table.to_numpy(dtype=np.float64)
    low, high = confidence_interval(values)
    return pd.DataFrame({"mean": values.mean(axis=1), "low": low, "high": high}, table.index)


def line_trace(line_style: ModelStyle, curve: pd.DataFrame, hover: str) -> dict[str, Any]:
    """A line, with markers if its style has a symbol."""
    trace = {
        "type": "scatter",
        "mode": "lines",
        "line": {"color": line_style.colour},
        **_trace(line_style, curve, hover),
    }
    if line_style.dash:
        trace["line"] |= {"dash": line_style.dash}
    if line_style.symbol:
        trace |= {"mode": "lines+markers", "marker": {"symbol": line_style.symbol}}
    return trace


def bar_trace(bar_style: ModelStyle, table: pd.DataFrame, hover: str) -> dict[str, Any]:
    """Bars; their texts are for the hover text alone."""
    trace = {"type": "bar", "marker": {"color": bar_style.colour}, **_trace(bar_style, table, hover)}
    if "opacity" in table:
        trace["marker"] |= {"opacity": [*trace.pop("opacity")]}
    return trace | ({"textposition": "none"} if "text" in table else {})


def _trace(of_name: ModelStyle, table: pd.DataFrame, hover: str) -> dict[str, Any]:
    """What lines and bars have in common."""
    trace: dict[str, Any] = {name: table[name] for name in table.columns.drop(["low", "high"], errors="ignore")}
    if "low" in table and table["low"].notna().any():
        trace["error_y"] = style.error_bars(table["y"], table["low"], table["high"])
    hover = (hover if "<extra>" in hover else f"{hover}<extra>{NAME}</extra>").replace(NAME, of_name.name)
    return {"x": table.index, **trace, "name": of_name.name or None, "hovertemplate": hover}


def position_axis(positions: npt.ArrayLike) -> Axis:
    """The logarithmic axis of a loss by position."""
    return {"title_text": "position (tokens, end of bin)", **axes.log_axis(positions)}


def length_axis(lengths: npt.ArrayLike, title: str = "context length (tokens)") -> Axis:
    """The logarithmic axis of context lengths."""
    return {"title_text": title, **axes.length_axis(lengths)}


def finish(figure: go.Figure, x: Axis, y: Axis) -> go.Figure:
    """Label the axes and name the lines, in place, and return the figure."""
    return style.fit_legend(label_axes(figure, x, y))


def label_axes(figure: go.Figure, x: Axis, y: Axis) -> go.Figure:
    """Label the axes in place, and return the figure."""
    figure.update_xaxes({"title_text": x} if isinstance(x, str) else x)
    return figure.update_yaxes({"title_text": y} if isinstance(y, str) else y)


def _with_level(figure: go.Figure, level: float | None, name: str = "") -> go.Figure:
    annotation = {"annotation_text": name} if name else {}
    return figure if level is None else figure.add_hline(y=level, line=style.REFERENCE_LINE, **annotation)
