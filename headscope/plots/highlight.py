"""Selected heads, highlighted in a figure whose points are heads (see `style.declare_head_points`)."""

from collections.abc import Collection

import numpy as np
import plotly.graph_objects as go

from headscope.heads import Head


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
