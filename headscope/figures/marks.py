"""Chosen heads, marked in a figure whose points are heads (`style.of_heads`)."""

from collections.abc import Collection

import numpy as np
import plotly.graph_objects as go

Head = tuple[int, int]
"""Layer and head."""


def of_heads(made: go.Figure) -> bool:
    """Whether the figure says that its points are heads."""
    return bool(made.layout.meta) and bool(made.layout.meta.get("heads"))


def mark(made: go.Figure, heads: Collection[Head]) -> go.Figure:
    """The figure with the chosen heads told apart: other points of a scatter fade, cells of a matrix get a frame.

    Changes and returns `made`; without `heads`, or where no point is a head, nothing happens.
    """
    if not heads or not of_heads(made):
        return made
    for trace in list(made.data):
        if trace.type == "heatmap":
            _frame(made, trace, heads)
        elif trace.customdata is not None:
            chosen = [at for at, told in enumerate(trace.customdata) if (int(told[0]), int(told[1])) in heads]
            trace.selectedpoints = chosen
            trace.unselected = {"marker": {"opacity": 0.12}}
    return made


def _frame(made: go.Figure, trace: go.Heatmap, heads: Collection[Head]) -> None:
    places = np.asarray(trace.customdata)[..., :2]
    rows, columns = np.nonzero([[tuple(place) in heads for place in line] for line in places])
    for colour, width in (("black", 5), ("white", 2)):  # to be seen on every colour of a scale
        made.add_scatter(
            x=[trace.x[column] for column in columns],
            y=[trace.y[row] for row in rows],
            mode="markers",
            marker={"symbol": "square-open", "size": 12, "color": colour, "line": {"width": width}},
            hoverinfo="skip",
            showlegend=False,
        )
