"""The width below which a page scrolls a figure instead of squeezing it."""

import plotly.graph_objects as go

from headscope.plots.colour_range import colorbar_space, colorbars

PANEL_WIDTH = 130
"""Width in px that each of several panels keeps."""
SLANTED_WIDTH, UPRIGHT_WIDTH = 15, 11
"""Width in px of a slanted and of an upright tick label."""


def least_width(figure: go.Figure) -> int:
    """Width in px at which panels and turned tick labels have room; 0 for a figure that fits everywhere."""
    needed = max(map(_needed_width, figure.select_xaxes()), default=0.0)
    right = max(map(colorbar_space, colorbars(figure)), default=32)
    return round(needed + 80 + right) if needed else 0


def _needed_width(axis: go.layout.XAxis) -> float:
    """Width in px of all plots that gives one axis its room."""
    start, end = axis.domain or (0, 1)
    width = UPRIGHT_WIDTH if axis.tickangle == -90 else SLANTED_WIDTH
    is_turned = axis.tickangle and axis.showticklabels is not False
    labels = width * len(axis.ticktext or ()) if is_turned else 0
    return max(labels, PANEL_WIDTH if end - start < 1 else 0) / (end - start)
