"""The house style: one template that reads on light and on dark paper, colours that colour-blind readers tell apart.

Knows plotly and nothing of runs. Text is a mid grey, paper is transparent; a page may darken or lighten the text
with CSS. Labels that come from users pass through `text`, because plotly reads a subset of HTML.
"""

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import diverging, sample_colorscale, sequential
from plotly.subplots import make_subplots

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
SEQUENTIAL = sequential.Viridis
DIVERGING = diverging.RdBu_r
PALETTE = ("#1F83C4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A900", "#8C8C8C")
"""Okabe and Ito's colours; blue is lightened and black greyed for dark paper, yellow darkened for white."""
HIGHLIGHT = "#D55E00"
"""For the one thing that a figure points at."""
TITLE, LINE = 60, 20
"""Characters in a line of a title, and px that each line after the first takes."""
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x")

_AXIS = {
    "gridcolor": GRID,
    "linecolor": "rgba(128,128,128,0.6)",
    "showline": True,
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": "rgba(128,128,128,0.6)",
    "title": {"standoff": 8, "font": {"size": 13}},
    "tickangle": 0,
    "automargin": True,
}
_BAR = {"thickness": 12, "outlinewidth": 0, "ticks": "outside", "title": {"font": {"size": 12}}}
TEMPLATE = go.layout.Template(
    data={"heatmap": [{"colorbar": _BAR}]},
    layout={
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 13, "color": INK},
        "title": {"x": 0, "xref": "container", "xanchor": "left", "y": 0.985, "yanchor": "top", "font": {"size": 15}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": PALETTE,
        "coloraxis": {"colorbar": _BAR},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": "#22262b", "bordercolor": "#22262b", "font": {"color": "#ffffff"}},
        # As wide as most tick labels ask for: plotly draws a chart twice whose margins it has to widen.
        "margin": {"l": 80, "r": 20, "t": 70, "b": 50},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,128,128,0.5)", "activecolor": INK},
    },
)


@dataclass(frozen=True)
class Look:
    """How one model is drawn in every figure."""

    name: str
    colour: str
    dash: str
    symbol: str
    among: int = field(default=1, compare=False)
    """How many are drawn together."""

    @property
    def shade(self) -> str:
        """The colour as a translucent fill."""
        return self._tint(0.16)

    @property
    def veil(self) -> str:
        """The colour as the fill of a band: fainter where many bands lie over each other."""
        return self._tint(min(0.16, 0.4 / self.among))

    def _tint(self, opacity: float) -> str:
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity:.3g})"


def looks(frame: pd.DataFrame) -> dict[str, Look]:
    """The models present in `frame`, in order. A colour follows the model's place among the categories."""
    if frame.empty or "model" not in frame:
        return {}
    column = frame["model"]
    present = set(column)
    order = list(column.cat.categories) if isinstance(column.dtype, pd.CategoricalDtype) else list(column.unique())
    return {
        label: Look(text(label), PALETTE[at % 8], DASHES[at % 4], SYMBOLS[at % 5], len(present))
        for at, label in enumerate(order)
        if label in present
    }


def graded(count: int) -> list[str]:
    """Colours from early to late for an ordered series, dark to bright."""
    shades: list[str] = sample_colorscale(SEQUENTIAL, [0.1 + 0.75 * at / max(1, count - 1) for at in range(count)])
    return shades


def text(label: object, width: int = 40) -> str:
    """A label as plotly text: its HTML made harmless, in lines of at most `width` characters."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(str(label), width)) or " "


def figure(title: str, height: int = 380) -> go.Figure:
    """An empty figure in the house style; `height` in px."""
    return headed(go.Figure(layout={"template": TEMPLATE, "height": height}), title)


def headed(made: go.Figure, title: str) -> go.Figure:
    """The figure under a title of as many lines as it takes in a chart of half the page."""
    told = text(html.unescape(title.replace("<br>", " ")), TITLE)
    made.layout.title = {"text": told, "pad": {"t": LINE * told.count("<br>")}}
    return made


def top(made: go.Figure, space: int = 46) -> go.Figure:
    """Leave `space` in px above the plot, and more where the title takes more than one line."""
    made.layout.margin.t = space + LINE * str(made.layout.title.text or "").count("<br>")
    return made


def panels(title: str, names: Sequence[str], columns: int = 3, height: int = 330) -> go.Figure:
    """Small multiples with shared axes and one name above each; `height` in px is that of a row of panels."""
    made = headed(go.Figure(_panels(len(names), columns, height)), title)
    for above, name in zip(made.layout.annotations, names, strict=True):
        above.text = name
    return top(made, 98)


@cache
def _panels(count: int, columns: int, height: int) -> go.Figure:
    """Empty panels, to copy: plotly takes ten times as long to lay them out."""
    across = min(columns, count)
    down = math.ceil(count / across)
    made = make_subplots(
        down,
        across,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=["name"] * count,
        horizontal_spacing=0.06 if across > 1 else 0.0,
        vertical_spacing=0.22 / down if down > 1 else 0.0,
    )
    total = height * down + 60
    legend = {"yref": "container", "y": 1 - 36 / total, "yanchor": "top"}
    made.update_layout(template=TEMPLATE, height=total, legend=legend)
    return made.update_annotations(font_size=13)


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


def of_heads(made: go.Figure) -> go.Figure:
    """Say of a figure that its points are heads: their `customdata` start with layer, head (-1: all) and key group."""
    for trace in made.data:
        if trace.type == "scatter" and trace.customdata is not None:
            # Dash cannot read packed arrays in selections; plotly keeps an equal value, so it goes first.
            places, trace.customdata = np.asarray(trace.customdata).tolist(), None
            trace.customdata = places
    return says(made, heads=True)


def says(made: go.Figure, **facts: object) -> go.Figure:
    """Note what the figure's numbers are, for those who save them: `value` their name, `model` whose they are where no
    trace tells, `shown` the place of the number itself in `customdata` where colours show something else."""
    made.layout.meta = {**(made.layout.meta or {}), **facts}
    return made


def suffix(unit: str) -> str:
    """The unit as it follows a number."""
    return f" {unit}" if unit else ""


def band(made: go.Figure, line: pd.DataFrame, look: Look, hover: str) -> None:
    """Draw `mean` against the index of `line`, in a band from `low` to `high` where these are finite."""
    if len(ends := line[["low", "high"]].dropna()):
        between(made, ends, look)
    made.add_scatter(
        x=line.index,
        y=line["mean"],
        mode="lines+markers",
        marker={"size": 5, "symbol": look.symbol},
        line={"color": look.colour, "dash": look.dash},
        name=look.name,
        legendgroup=look.name,
        hovertemplate=f"{hover}<extra>{look.name}</extra>",
    )


def between(made: go.Figure, ends: pd.DataFrame, look: Look, **place: int) -> None:
    """Shade from `low` to `high` against the index of `ends`."""
    edge = {"mode": "lines", "line_width": 0, "hoverinfo": "skip", "showlegend": False, "legendgroup": look.name}
    made.add_scatter(x=ends.index, y=ends["low"], **edge, **place)
    made.add_scatter(x=ends.index, y=ends["high"], fill="tonexty", fillcolor=look.veil, **edge, **place)


def room_for_legend(made: go.Figure) -> go.Figure:
    """Raise the top margin so that a legend that wraps, at about 62 characters a row, stays below the title."""
    names = [len(trace.name) + 7 for trace in made.data if trace.name and trace.showlegend is not False]
    return top(made.update_layout(showlegend=True), 46 + 24 * max(1, math.ceil(sum(names) / 62)))


def stack(title: str, height: int) -> go.Figure:
    """Two plots, one above the other, that share their x axis; `height` in px."""
    return headed(go.Figure(_stack(height)), title)


@cache
def _stack(height: int) -> go.Figure:
    made = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.42, 0.58])
    return made.update_layout(template=TEMPLATE, height=height)


def bars(middle: pd.Series, low: npt.ArrayLike, high: npt.ArrayLike) -> dict[str, Any]:
    """Error bars from `low` to `high` about `middle`; none where these are NaN."""
    return {
        "array": np.asarray(high) - middle,
        "arrayminus": middle - np.asarray(low),
        "symmetric": False,
        "thickness": 1,
        "width": 2,
    }
