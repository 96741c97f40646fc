"""Ends of colour scales, and marks for the values beyond them.

A symmetric scale ends at the 99 % quantile of the absolute values, so that one outlier does not make all other cells
white. The cells beyond it and the end of the colour bar then state the values.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from headscope.plots import style

ZERO_CENTRED_SCALE = {"colorscale": style.DIVERGING_SCALE, "zmid": 0}
"""Plotly settings of a heatmap of signed values: white is zero."""
MAX_MARKS = 24
"""Cells with a mark; the largest values."""
MAX_COLUMNS = 6
"""Columns of a matrix up to which a cell has room for a number, also on a narrow screen."""
MAX_ARROW_COLUMNS = 32
"""Columns of a matrix up to which a cell has room for an arrow."""


def symmetric_limit(values: npt.ArrayLike, minimum: float = 0.0) -> float:
    """The end of a symmetric colour scale: the 99 % quantile of the absolute values, 0.01 if all are zero."""
    magnitudes = np.abs(np.asarray(values, dtype=np.float64))
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    limit = float(np.quantile(magnitudes, 0.99)) if len(magnitudes) else 0.0
    return max(limit, minimum) or 0.01


def signed_format(values: npt.ArrayLike, limit: float) -> Callable[[float], str]:
    """Format with two significant digits, or with as many as tell the extremes of the values from the limit and keep
    them from being rounded to the next power of ten: 0.999 is not 1."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    extremes = {abs(float(end)) for end in ((numbers.min(), numbers.max()) if len(numbers) else ())}
    ends = {limit, *(end for end in extremes if is_clipped(end, limit))}

    def is_precise(digits: int) -> bool:
        rounded = {end: float(f"{end:.{digits}g}") for end in ends}
        keeps_power = all(math.floor(math.log10(end)) == math.floor(math.log10(rounded[end])) for end in ends)
        return keeps_power and [*rounded.values()].count(rounded[limit]) == 1

    return f"{{:+.{next((digits for digits in range(2, 6) if is_precise(digits)), 6)}g}}".format


def symmetric_colorbar(
    values: npt.ArrayLike, limit: float, format_value: Callable[[float], str] | None = None
) -> dict[str, Any]:
    """Plotly settings of a colour bar from -limit to limit; an end beyond which values lie states their extreme."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 0.0)
    if not is_clipped(low, limit) and not is_clipped(high, limit):
        return {}
    format_value = format_value or signed_format(numbers, limit)
    ticks = [-limit, -limit / 2, 0.0, limit / 2, limit]
    texts = [format_value(tick) if tick else format_value(0.0).lstrip("+") for tick in ticks]
    if is_clipped(low, limit) and low < 0:
        texts[0] = f"≤ {texts[0]}<br>min {format_value(low)}"
    if is_clipped(high, limit) and high > 0:
        texts[-1] = f"<br>≥ {texts[-1]}<br>max {format_value(high)}"  # the empty line keeps the title above free
    return {"tickvals": ticks, "ticktext": [text.replace("-", "−") for text in texts]}


def signed_colours(limit: float, unit: str, values: npt.ArrayLike = ()) -> dict[str, Any]:
    """Plotly settings of a heatmap from blue (-limit) over white (0) to red (limit).

    An end of its colour bar beyond which some of the `values` lie states their extreme.
    """
    bar = {"title": {"text": unit}} | symmetric_colorbar(values, limit)
    return {"zmin": -limit, "zmax": limit, "colorbar": bar, **ZERO_CENTRED_SCALE}


def mark_clipped_cells(
    figure: go.Figure,
    grid: npt.NDArray[np.float64],
    limit: float,
    format_value: Callable[[float], str] | None = None,
) -> go.Figure:
    """Write the values beyond the colour scale into the cells of the figure's one matrix, and return the figure.

    A matrix with many columns has only room for an arrow: up for a value above the scale, down for one below. One with
    more columns than that has no marks.
    """
    if grid.shape[1] > MAX_ARROW_COLUMNS:
        return figure
    format_value = format_value or signed_format(grid[np.isfinite(grid)], limit)
    x, y = figure.data[0].x, figure.data[0].y
    rows, columns = np.nonzero(np.abs(np.nan_to_num(grid)) > limit * (1 + 1e-9))
    largest = np.argsort(-np.abs(grid[rows, columns]), kind="stable")[:MAX_MARKS]
    marks = []
    for row, column in zip(rows[largest], columns[largest], strict=True):
        value = float(grid[row, column])
        arrow = "▲" if value > 0 else "▼"
        text = arrow if grid.shape[1] > MAX_COLUMNS else format_value(value).replace("-", "−")
        text = f'<span style="color:#ffffff">{text}</span>'  # the app colours other annotations like its text
        mark = {"x": x[column], "y": y[row], "text": text, "showarrow": False, "font": {"size": 10}}
        marks.append(mark)
    style.add_annotations(figure, marks)
    return figure


def colorbars(figure: go.Figure) -> list[go.heatmap.ColorBar]:
    """The colour bars that the figure shows."""
    matrices = [trace for trace in figure.data if trace.type == "heatmap" and trace.coloraxis is None]
    points = [trace.marker for trace in figure.data if trace.type == "scatter" and trace.marker.showscale]
    shared = [figure.layout.coloraxis] if figure.layout.coloraxis.colorscale else []
    return [scale.colorbar for scale in (*matrices, *points, *shared) if scale.showscale is not False]


def colorbar_space(bar: go.heatmap.ColorBar) -> int:
    """The width in px of a margin that holds the colour bar: plotly draws a chart twice if it has to widen a margin."""
    lines = [line for text in bar.ticktext or () for line in text.split("<br>")]
    longest = max(map(len, lines), default=0)
    return math.ceil(max(100, 56 + 8.4 * longest, 28 + 6 * len(bar.title.text or "")))


def is_clipped(value: float, limit: float) -> bool:
    """Whether the value lies beyond a symmetric scale."""
    return math.isfinite(value) and abs(value) > limit * (1 + 1e-9)
