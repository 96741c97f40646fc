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
    matrices = [trace for trace in made.data if trace.type == "heatmap"]
    for trace in matrices:
        _frame(made, trace, heads, size=12 if len(matrices) == 1 else 7)
    for trace in made.data:
        if trace.type != "heatmap" and trace.customdata is not None:
            chosen = [at for at, told in enumerate(trace.customdata) if (int(told[0]), int(told[1])) in heads]
            trace.selectedpoints = chosen
            trace.unselected = {"marker": {"opacity": 0.12}}
    return made


def _frame(made: go.Figure, trace: go.Heatmap, heads: Collection[Head], size: int) -> None:
    places = np.asarray(trace.customdata)[..., :2]
    rows, columns = np.nonzero([[tuple(place) in heads for place in line] for line in places])
    for colour, width in (("black", size * 0.4), ("white", size * 0.16)):  # to be seen on every colour of a scale
        made.add_scatter(
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
        axis = made.layout[f"{name[0]}axis{name[1:]}"]
        first = (0 if isinstance(cells[0], str) else cells[0]) - 0.5
        ends = [first, first + len(cells)]  # left to itself, the axis makes room for frames at its ends
        axis.update(range=ends[::-1] if axis.autorange == "reversed" else ends, autorange=False)
