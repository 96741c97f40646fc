"""Names of lines at their right ends, in place of a legend."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

Settings = dict[str, Any]
"""A figure, or a part of one, as plotly settings."""
Values = npt.NDArray[np.float64]

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
    settings = line_end_settings([trace.to_plotly_json() for trace in figure.data], figure.layout.to_plotly_json())
    if settings is None:
        return False
    figure.layout.annotations = settings.pop("annotations")
    figure.update_layout(settings)
    return True


def line_end_settings(traces: Sequence[Settings], layout: Settings) -> Settings | None:
    """The layout settings that name the lines at their ends and hide the legend, from a figure as plotly settings.

    None where `label_line_ends` returns False.
    """
    named = [trace for trace in traces if trace.get("name") and trace.get("showlegend") is not False]
    if layout.get("legend", {}).get("yref") == "container" or not named or not all(map(_is_line, named)):
        return None
    margin = layout.get("margin", {})
    height = layout["height"] - (margin.get("b") or 56) - (margin.get("t") or 70)
    names = [_wrapped(str(trace["name"])) for trace in named]
    low_end, high_end = _y_axis(layout, named[0]).get("domain") or (0, 1)
    values_by_axis = {axis: _axis_values(traces, axis) for axis in {trace.get("yaxis") for trace in named}}
    places = [
        _share_of_axis(_y_axis(layout, trace), values_by_axis[trace.get("yaxis")], trace["y"])
        * height
        * (high_end - low_end)
        for trace in named
    ]
    spread = spread_labels(places, [LINE_HEIGHT * (1 + name.count("<br>")) for name in names])
    if spread is None or max(spread) > height * (high_end - low_end) + LINE_HEIGHT:
        return None
    labels = [
        {
            "text": f'<span style="color:{trace["line"]["color"]}">▬</span> {name}',
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
        for trace, name, place in zip(named, names, spread, strict=True)
    ]
    width = max(len(line) for name in names for line in name.split("<br>"))
    return {
        "annotations": [*layout.get("annotations", ()), *labels],
        "showlegend": False,
        "margin": {**margin, "r": math.ceil(28 + CHARACTER_WIDTH * width)},
    }


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


def _is_line(trace: Settings) -> bool:
    if trace["type"] != "scatter" or "lines" not in trace.get("mode", ""):
        return False
    x = trace.get("x")
    return isinstance(trace.get("line", {}).get("color"), str) and x is not None and not _has_text(x)


def _has_text(values: Any) -> bool:
    is_numeric = isinstance(values, np.ndarray) and values.dtype.kind in "iufb"
    return not is_numeric and any(isinstance(value, str) for value in values)


def _y_axis(layout: Settings, trace: Settings) -> Settings:
    axis: Settings = layout.get(f"yaxis{trace.get('yaxis', 'y')[1:]}", {})
    return axis


def _wrapped(name: str) -> str:
    """The name in lines of at most `MAX_NAME_WIDTH` characters, as far as it has spaces."""
    lines: list[str] = []
    for word in name.replace("<br>", " ").split():
        if lines and len(lines[-1]) + len(word) < MAX_NAME_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "<br>".join(lines)


def _axis_values(traces: Sequence[Settings], axis: str | None) -> Values:
    """The y values of all traces of a y axis."""
    return np.concatenate(
        [_numbers(y) for trace in traces if (y := trace.get("y")) is not None and trace.get("yaxis") == axis]
    )


def _numbers(values: Any) -> Values:
    return np.asarray(values, dtype=np.float64)


def _share_of_axis(axis: Settings, axis_values: Values, line_values: Any) -> float:
    """Where the last point of the line lies on its y axis, from 0 (lower end) to 1."""
    values, last = axis_values, _numbers(line_values)
    if axis.get("type") == "log":
        with np.errstate(divide="ignore", invalid="ignore"):
            values, last = np.log10(values), np.log10(last)
    values, last = values[np.isfinite(values)], last[np.isfinite(last)]
    if not len(last):
        return math.nan
    if axis.get("range"):
        low, high = axis["range"]
    else:
        low, high = float(values.min()), float(values.max())
        pad = 0.06 * (high - low)
        low, high = (0.0 if axis.get("rangemode") == "tozero" and low >= 0 else low - pad), high + pad
    return float((last[-1] - low) / ((high - low) or 1.0))
