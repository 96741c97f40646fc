"""Names of lines at their right ends, in place of a legend."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go

LINE_END = "line end"
"""Name of the annotations."""
LINE_HEIGHT, CHARACTER_WIDTH = 16, 6.4
"""Height of a line of text and mean width of a character, in px."""
MAX_NAME_WIDTH = 12
"""Characters of a line of a name; longer names are wrapped at spaces."""


def label_line_ends(figure: go.Figure) -> bool:
    """Write the names of the lines right of their last points, in place, and hide the legend.

    Returns False, and leaves the figure as it is, if its legend names anything but lines over numbers, if it has panels
    side by side, or if the names do not fit.
    """
    traces = [trace for trace in figure.data if trace.name and trace.showlegend is not False]
    if figure.layout.legend.yref == "container" or not traces or not all(map(_is_line, traces)):
        return False
    height = figure.layout.height - (figure.layout.margin.b or 56) - (figure.layout.margin.t or 70)
    names = [_wrapped(str(trace.name)) for trace in traces]
    axis = figure.layout[f"yaxis{(traces[0].yaxis or 'y')[1:]}"]
    low_end, high_end = axis.domain or (0, 1)
    places = [_share_of_axis(figure, trace) * height * (high_end - low_end) for trace in traces]
    spread = spread_labels(places, [LINE_HEIGHT * (1 + name.count("<br>")) for name in names])
    if spread is None or max(spread) > height * (high_end - low_end) + LINE_HEIGHT:
        return False
    labels = [
        {
            "text": f'<span style="color:{trace.line.color}">▬</span> {name}',
            "x": 1,
            "xref": "paper",
            "xanchor": "left",
            "xshift": 4,
            "y": low_end + place / height,
            "yref": "paper",
            "yanchor": "middle",
            "align": "left",
            "showarrow": False,
            "font": {"size": 12},
            "name": LINE_END,
        }
        for trace, name, place in zip(traces, names, spread, strict=True)
    ]
    figure.layout.annotations = [*figure.layout.annotations, *labels]
    width = max(len(line) for name in names for line in name.split("<br>"))
    figure.update_layout(showlegend=False, margin_r=math.ceil(28 + CHARACTER_WIDTH * width))
    return True


def replace_line_ends(figure: go.Figure) -> None:
    """Place the names of lines again, in place, after the height of the figure has changed."""
    if restore_legend(figure):
        label_line_ends(figure)


def restore_legend(figure: go.Figure) -> bool:
    """Undo `label_line_ends`, in place; False if the figure has no names at the ends of lines."""
    others = [annotation for annotation in figure.layout.annotations if annotation.name != LINE_END]
    if len(others) == len(figure.layout.annotations):
        return False
    figure.layout.annotations = others
    figure.update_layout(showlegend=True)
    return True


def spread_labels(places: Sequence[float], heights: Sequence[float]) -> list[float] | None:
    """Centres of labels (px from below) near `places` that do not overlap; None if a place is not a number."""
    if not len(places):
        return []
    if not np.isfinite(places).all():
        return None
    order = np.argsort(places, kind="stable")
    centres = np.asarray(places, dtype=np.float64)
    for _ in range(60):  # neighbours that overlap move apart by equal steps
        for below, above in pairwise(order):
            overlap = (heights[below] + heights[above]) / 2 - (centres[above] - centres[below])
            if overlap > 0:
                centres[below] -= overlap / 2
                centres[above] += overlap / 2
        centres += max(0.0, -float(centres.min()))  # none lies below the axis
    return [*map(float, centres)]


def _is_line(trace: Any) -> bool:
    if trace.type != "scatter" or "lines" not in (trace.mode or ""):
        return False
    return isinstance(trace.line.color, str) and trace.x is not None and not any(isinstance(x, str) for x in trace.x)


def _wrapped(name: str) -> str:
    """The name in lines of at most `MAX_NAME_WIDTH` characters, as far as it has spaces."""
    lines: list[str] = []
    for word in name.replace("<br>", " ").split():
        if lines and len(lines[-1]) + len(word) < MAX_NAME_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "<br>".join(lines)


def _share_of_axis(figure: go.Figure, trace: Any) -> float:
    """Where the last point of the line lies on its y axis, from 0 (lower end) to 1."""
    axis = figure.layout[f"yaxis{(trace.yaxis or 'y')[1:]}"]
    others = [other.y for other in figure.data if other.y is not None and other.yaxis == trace.yaxis]
    values = np.concatenate([np.asarray(y, dtype=np.float64) for y in others])
    last = np.asarray(trace.y, dtype=np.float64)
    is_log = axis.type == "log"
    if is_log:
        with np.errstate(divide="ignore", invalid="ignore"):
            values, last = np.log10(values), np.log10(last)
    values, last = values[np.isfinite(values)], last[np.isfinite(last)]
    if not len(last):
        return math.nan
    if axis.range:
        low, high = axis.range
    else:
        low, high = float(values.min()), float(values.max())
        pad = 0.06 * (high - low)
        low, high = (0.0 if axis.rangemode == "tozero" and low >= 0 else low - pad), high + pad
    return float((last[-1] - low) / ((high - low) or 1.0))
