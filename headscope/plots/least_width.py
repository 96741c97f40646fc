"""The width below which a page scrolls a figure instead of squeezing it."""

from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from headscope.plots.colour_range import colorbar_space, colorbars

PANEL_WIDTH = 130
"""Width in px that each of several panels keeps."""
SLANTED_WIDTH, UPRIGHT_WIDTH, CHARACTER_WIDTH, LABEL_GAP = 15, 11, 6.6, 6
"""Width in px of a slanted and of an upright tick label, and of a character and the gap of level ones."""
CELL_WIDTH, MIN_CELLS = 2, 100
"""Width in px that a cell of a matrix keeps, if it has at least so many columns."""


def least_width(figure: go.Figure) -> int:
    """Width in px at which panels, many cells and tick labels have room; 0 for a figure that fits everywhere."""
    needed = max((_needed_width(figure, axis) for axis in figure.select_xaxes()), default=0.0)
    right = max(map(colorbar_space, colorbars(figure)), default=32)
    return round(needed + _left_space(figure) + right) if needed else 0


def _left_space(figure: go.Figure) -> float:
    """Width in px of the title and the tick labels left of the plot, for which plotly widens the margin."""
    names = [
        y
        for trace in figure.data
        if trace.type == "heatmap"
        for y in (() if trace.y is None else trace.y)
        if isinstance(y, str)
    ]
    longest = max((len(line) for name in names for line in name.split("<br>")), default=0)
    return max(figure.layout.margin.l or 80, CHARACTER_WIDTH * longest + 50)


def _needed_width(figure: go.Figure, axis: go.layout.XAxis) -> float:
    """Width in px of all plots that gives one axis its room."""
    start, end = axis.domain or (0, 1)
    traces = [*_traces_on(figure, axis)]
    labels = 0.0 if axis.showticklabels is False else _label_width(axis, traces)
    columns = max((len(trace.x) for trace in traces if trace.type == "heatmap" and trace.x is not None), default=0)
    cells = CELL_WIDTH * columns if columns >= MIN_CELLS else 0
    return max(labels, cells, PANEL_WIDTH if end - start < 1 else 0) / (end - start)


def _label_width(axis: go.layout.XAxis, traces: Sequence[Any]) -> float:
    """Width in px of all tick labels that are texts."""
    texts = axis.ticktext or [*dict.fromkeys(x for trace in traces for x in trace.x if isinstance(x, str))]
    if axis.tickangle:
        return (UPRIGHT_WIDTH if axis.tickangle == -90 else SLANTED_WIDTH) * len(axis.ticktext or ())
    if axis.type != "category" or axis.nticks or not texts:
        return 0.0  # plotly leaves out labels without room, or they were chosen for the narrowest chart
    longest = max(len(line) for text in texts for line in text.split("<br>"))
    return (CHARACTER_WIDTH * longest + LABEL_GAP) * len(texts) / (axis.dtick or 1)


def _traces_on(figure: go.Figure, axis: go.layout.XAxis) -> Iterator[Any]:
    """The traces on this axis that have x values."""
    name = axis.plotly_name.replace("axis", "")
    drawn = (trace for trace in figure.data if getattr(trace, "x", None) is not None)  # a table has none
    return (trace for trace in drawn if (getattr(trace, "xaxis", None) or "x") == name)
