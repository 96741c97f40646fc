"""The house style: one template that reads on light and on dark paper, colours that colour-blind readers tell apart.

Knows plotly and nothing of runs. Text is a mid grey, paper is transparent; a page may darken or lighten the text
with CSS. Labels that come from users pass through `text`, because plotly reads a subset of HTML.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import diverging, sequential
from plotly.subplots import make_subplots

from headscope.summary import Statistic

GRAPH_CONFIG: Mapping[str, Any] = {
    "showSendToCloud": False,  # plotly 7 shows an upload button by default
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "headscope"},
}
"""Pass this to every place that shows a figure."""

INK = "#777777"
GRID = "rgba(128,128,128,0.22)"
SEQUENTIAL = sequential.Cividis
DIVERGING = diverging.RdBu_r
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A900", "#8C8C8C")
"""Okabe and Ito's colours; yellow is darkened for white paper, black is grey for dark paper."""
DASHES = ("solid", "dash", "dot")
SYMBOLS = ("circle", "diamond", "square")

_AXIS = {
    "gridcolor": GRID,
    "linecolor": "rgba(128,128,128,0.6)",
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": "rgba(128,128,128,0.6)",
    "title": {"standoff": 8},
    "automargin": True,
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": INK},
        "title": {"x": 0, "xref": "paper", "xanchor": "left", "y": 0.985, "yanchor": "top", "font": {"size": 15}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": PALETTE,
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": "#22262b", "bordercolor": "#22262b", "font": {"color": "#ffffff"}},
        "margin": {"l": 60, "r": 20, "t": 70, "b": 50},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,128,128,0.5)", "activecolor": INK},
    }
)


@dataclass(frozen=True)
class Look:
    """How one model is drawn in every figure."""

    name: str
    colour: str
    dash: str
    symbol: str

    @property
    def shade(self) -> str:
        """The colour as a translucent fill for bands."""
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},0.16)"


def looks(frame: pd.DataFrame) -> dict[str, Look]:
    """The models present in `frame`, in order. A colour follows the model's place among the categories."""
    if frame.empty or "model" not in frame:
        return {}
    column = frame["model"]
    present = set(column)
    order = list(column.cat.categories) if isinstance(column.dtype, pd.CategoricalDtype) else list(column.unique())
    return {
        label: Look(text(label), PALETTE[at % 8], DASHES[at // 8 % 3], SYMBOLS[at // 8 % 3])
        for at, label in enumerate(order)
        if label in present
    }


def text(label: object) -> str:
    """A label as plotly text, its HTML made harmless."""
    return html.escape(str(label), quote=False)


def figure(title: str, height: int = 380) -> go.Figure:
    """An empty figure in the house style; `height` in px."""
    return go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": height})


def panels(title: str, names: Sequence[str], columns: int = 3, height: int = 330) -> go.Figure:
    """Small multiples with shared axes and one name above each; `height` in px is that of a row of panels."""
    across = min(columns, len(names))
    down = math.ceil(len(names) / across)
    made = make_subplots(
        down,
        across,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=list(names),
        horizontal_spacing=0.06 if across > 1 else 0.0,
        vertical_spacing=0.28 / down if down > 1 else 0.0,
    )
    made.update_layout(template=TEMPLATE, title={"text": title}, height=height * down + 60)
    made.update_layout(margin_t=96, legend={"y": 1, "yref": "container", "yanchor": "top", "title": {"text": ""}})
    made.update_layout(legend_y=1 - 34 / (height * down + 60))
    made.update_annotations(font_size=13)
    return made


def place(at: int, names: Sequence[object], columns: int = 3) -> dict[str, int]:
    """Row and column of panel `at`, as plotly's `add_trace` wants them."""
    across = min(columns, len(names))
    return {"row": at // across + 1, "col": at % across + 1}


def outer_titles(made: go.Figure, count: int, x: str, y: str, columns: int = 3) -> None:
    """Name the axes once: x under the lowest panel of each column, y left of each row."""
    across = min(columns, count)
    for at in range(count):
        if at + across >= count:
            made.update_xaxes(title_text=x, showticklabels=True, **place(at, range(count), columns))
        if at % across == 0:
            made.update_yaxes(title_text=y, **place(at, range(count), columns))


def nothing(title: str, why: str) -> go.Figure:
    """A figure that says in words why it is empty."""
    made = figure(title, 200)
    made.update_xaxes(visible=False)
    made.update_yaxes(visible=False)
    made.add_annotation(text=why, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=14)
    return made


def lacks(frame: pd.DataFrame, *columns: str) -> str:
    """Why `frame` cannot be drawn: what is missing, or "" when nothing is."""
    if missing := [name for name in columns if name not in frame]:
        return f"not measured: {text(', '.join(missing))}"
    return "" if len(frame.dropna(subset=list(columns))) else "no rows to show"


def worded(statistic: Statistic) -> str:
    """Axis title of a statistic: its label with the unit in brackets."""
    return f"{statistic.label} ({statistic.unit})" if statistic.unit else statistic.label


def suffix(unit: str) -> str:
    """The unit as it follows a number."""
    return f" {unit}" if unit else ""


def log_ticks(values: npt.ArrayLike) -> dict[str, Any]:
    """Tick values (in data units) and their text for a log axis over `values`: 1, 2, 5, 10 ... or powers of ten."""
    numbers = np.asarray(values, dtype=np.float64).ravel()
    numbers = numbers[np.isfinite(numbers) & (numbers > 0)]
    if not len(numbers):
        return {}
    low, high = math.log10(numbers.min()), math.log10(numbers.max())
    steps = (1, 2, 5) if high - low < 3 else (1,)
    ticks = [step * 10.0**power for power in range(math.floor(low) - 1, math.ceil(high) + 1) for step in steps]
    near = [tick for tick in ticks if low - 0.31 <= math.log10(tick) <= high + 0.31]
    return {"tickvals": near, "ticktext": [readable(tick) for tick in near]}


def readable(value: float) -> str:
    """A round number as tick text: 0.05, 1, 2,000, 10<sup>-4</sup>."""
    if 1e-3 <= value < 1e6:
        return f"{value:,.12g}"
    mantissa, power = f"{value:.0e}".split("e")
    head = "" if mantissa == "1" else f"{mantissa}×"
    return f"{head}10<sup>{int(power)}</sup>".replace("-", "−")


def log_axis(values: npt.ArrayLike) -> dict[str, Any]:
    """Axis settings for a log axis over `values`."""
    return {"type": "log", **log_ticks(values)}
