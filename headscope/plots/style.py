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

TEXT_COLOUR = "#777777"
GRID_COLOUR = "rgba(128,128,128,0.22)"
SEQUENTIAL_SCALE = sequential.Viridis
DIVERGING_SCALE = diverging.RdBu_r
PALETTE = ("#1F83C4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A900", "#8C8C8C")
"""Okabe and Ito's colours; blue is lightened and black greyed for dark paper, yellow darkened for white."""
HIGHLIGHT_COLOUR = "#D55E00"
"""For the one thing that a figure points at."""
TITLE_WIDTH, TITLE_LINE_HEIGHT = 60, 20
"""Characters in a line of a title, and px that each line after the first takes."""
LINE_DASHES = ("solid", "dash", "dot", "dashdot")
MARKER_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x")

_AXIS_STYLE = {
    "gridcolor": GRID_COLOUR,
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
_COLORBAR_STYLE = {"thickness": 12, "outlinewidth": 0, "ticks": "outside", "title": {"font": {"size": 12}}}
TEMPLATE = go.layout.Template(
    data={"heatmap": [{"colorbar": _COLORBAR_STYLE}]},
    layout={
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
            "size": 13,
            "color": TEXT_COLOUR,
        },
        "title": {"x": 0, "xref": "container", "xanchor": "left", "y": 0.985, "yanchor": "top", "font": {"size": 15}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": PALETTE,
        "coloraxis": {"colorbar": _COLORBAR_STYLE},
        "xaxis": _AXIS_STYLE,
        "yaxis": _AXIS_STYLE,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": "#22262b", "bordercolor": "#22262b", "font": {"color": "#ffffff"}},
        # As wide as most tick labels ask for: plotly draws a chart twice whose margins it has to widen.
        "margin": {"l": 80, "r": 20, "t": 70, "b": 50},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,128,128,0.5)", "activecolor": TEXT_COLOUR},
    },
)


@dataclass(frozen=True)
class ModelStyle:
    """How one model is drawn in every figure."""

    name: str
    colour: str
    dash: str
    symbol: str
    model_count: int = field(default=1, compare=False)
    """How many are drawn together."""

    @property
    def fill_colour(self) -> str:
        """The colour as a translucent fill."""
        return self._rgba(0.16)

    @property
    def band_colour(self) -> str:
        """The colour as the fill of a band: fainter where many bands lie over each other."""
        return self._rgba(min(0.16, 0.4 / self.model_count))

    def _rgba(self, opacity: float) -> str:
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity:.3g})"


def model_styles(frame: pd.DataFrame) -> dict[str, ModelStyle]:
    """The models present in `frame`, in order. A colour follows the model's place among the categories."""
    if frame.empty or "model" not in frame:
        return {}
    column = frame["model"]
    present = set(column)
    order = list(column.cat.categories) if isinstance(column.dtype, pd.CategoricalDtype) else list(column.unique())
    return {
        label: ModelStyle(
            escape_label(label), PALETTE[at % 8], LINE_DASHES[at % 4], MARKER_SYMBOLS[at % 5], len(present)
        )
        for at, label in enumerate(order)
        if label in present
    }


def ordered_colours(colour_count: int) -> list[str]:
    """Colours from early to late for an ordered series, dark to bright."""
    shades: list[str] = sample_colorscale(
        SEQUENTIAL_SCALE, [0.1 + 0.75 * at / max(1, colour_count - 1) for at in range(colour_count)]
    )
    return shades


def escape_label(label: object, width: int = 40) -> str:
    """A label as plotly text: its HTML made harmless, in lines of at most `width` characters."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(str(label), width)) or " "


def new_figure(title: str, height: int = 380) -> go.Figure:
    """An empty figure in the house style; `height` in px."""
    return set_title(go.Figure(layout={"template": TEMPLATE, "height": height}), title)


def set_title(figure: go.Figure, title: str) -> go.Figure:
    """The figure under a title of as many lines as it takes in a chart of half the page."""
    told = escape_label(html.unescape(title.replace("<br>", " ")), TITLE_WIDTH)
    figure.layout.title = {"text": told, "pad": {"t": TITLE_LINE_HEIGHT * told.count("<br>")}}
    return figure


def set_top_margin(figure: go.Figure, space: int = 46) -> go.Figure:
    """Leave `space` in px above the plot, and more where the title takes more than one line."""
    figure.layout.margin.t = space + TITLE_LINE_HEIGHT * str(figure.layout.title.text or "").count("<br>")
    return figure


def panel_figure(title: str, panel_titles: Sequence[str], columns: int = 3, height: int = 330) -> go.Figure:
    """Small multiples with shared axes and one name above each; `height` in px is that of a row of panels."""
    made = set_title(go.Figure(_empty_panels(len(panel_titles), columns, height)), title)
    for above, name in zip(made.layout.annotations, panel_titles, strict=True):
        above.text = name
    return set_top_margin(made, 98)


@cache
def _empty_panels(panel_count: int, columns: int, height: int) -> go.Figure:
    """Empty panels, to copy: plotly takes ten times as long to lay them out."""
    across = min(columns, panel_count)
    down = math.ceil(panel_count / across)
    made = make_subplots(
        down,
        across,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=["name"] * panel_count,
        horizontal_spacing=0.06 if across > 1 else 0.0,
        vertical_spacing=0.22 / down if down > 1 else 0.0,
    )
    total = height * down + 60
    legend = {"yref": "container", "y": 1 - 36 / total, "yanchor": "top"}
    made.update_layout(template=TEMPLATE, height=total, legend=legend)
    return made.update_annotations(font_size=13)


def panel_row_col(index: int, panels: Sequence[object], columns: int = 3) -> dict[str, int]:
    """Row and column of panel `at`, as plotly's `add_trace` wants them."""
    across = min(columns, len(panels))
    return {"row": index // across + 1, "col": index % across + 1}


def set_outer_axis_titles(figure: go.Figure, panel_count: int, x_title: str, y_title: str, columns: int = 3) -> None:
    """Name the axes once: x under the lowest panel of each column, y left of each row."""
    across = min(columns, panel_count)
    for at in range(panel_count):
        if at + across >= panel_count:
            figure.update_xaxes(
                title_text=x_title, showticklabels=True, **panel_row_col(at, range(panel_count), columns)
            )
        if at % across == 0:
            figure.update_yaxes(title_text=y_title, **panel_row_col(at, range(panel_count), columns))


def empty_figure(title: str, reason: str) -> go.Figure:
    """A figure that says in words why it is empty."""
    made = new_figure(title, 200)
    made.update_xaxes(visible=False)
    made.update_yaxes(visible=False)
    made.add_annotation(text=reason, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=14)
    return made


def missing_data_reason(frame: pd.DataFrame, *required_columns: str) -> str:
    """Why `frame` cannot be drawn: what is missing, or "" when nothing is."""
    if missing := [name for name in required_columns if name not in frame]:
        return f"not measured: {escape_label(', '.join(missing))}"
    return "" if len(frame.dropna(subset=list(required_columns))) else "no rows to show"


def declare_head_points(figure: go.Figure) -> go.Figure:
    """Say of a figure that its points are heads: their `customdata` start with layer, head (-1: all) and key group."""
    for trace in figure.data:
        if trace.type == "scatter" and trace.customdata is not None:
            # Dash cannot read packed arrays in selections; plotly keeps an equal value, so it goes first.
            places, trace.customdata = np.asarray(trace.customdata).tolist(), None
            trace.customdata = places
    return set_metadata(figure, heads=True)


def set_metadata(figure: go.Figure, **metadata: object) -> go.Figure:
    """Note what the figure's numbers are, for those who save them: `value` their name, `model` whose they are where no
    trace tells, `shown` the place of the number itself in `customdata` where colours show something else."""
    figure.layout.meta = {**(figure.layout.meta or {}), **metadata}
    return figure


def unit_suffix(unit: str) -> str:
    """The unit as it follows a number."""
    return f" {unit}" if unit else ""


def add_line_with_band(figure: go.Figure, curve: pd.DataFrame, model_style: ModelStyle, hover: str) -> None:
    """Draw `mean` against the index of `line`, in a band from `low` to `high` where these are finite."""
    if len(ends := curve[["low", "high"]].dropna()):
        add_band(figure, ends, model_style)
    figure.add_scatter(
        x=curve.index,
        y=curve["mean"],
        mode="lines+markers",
        marker={"size": 5, "symbol": model_style.symbol},
        line={"color": model_style.colour, "dash": model_style.dash},
        name=model_style.name,
        legendgroup=model_style.name,
        hovertemplate=f"{hover}<extra>{model_style.name}</extra>",
    )


def add_band(figure: go.Figure, bounds: pd.DataFrame, model_style: ModelStyle, **panel_position: int) -> None:
    """Shade from `low` to `high` against the index of `ends`."""
    edge = {"mode": "lines", "line_width": 0, "hoverinfo": "skip", "showlegend": False, "legendgroup": model_style.name}
    figure.add_scatter(x=bounds.index, y=bounds["low"], **edge, **panel_position)
    figure.add_scatter(
        x=bounds.index, y=bounds["high"], fill="tonexty", fillcolor=model_style.band_colour, **edge, **panel_position
    )


def fit_legend(figure: go.Figure) -> go.Figure:
    """Raise the top margin so that a legend that wraps, at about 62 characters a row, stays below the title."""
    names = [len(trace.name) + 7 for trace in figure.data if trace.name and trace.showlegend is not False]
    return set_top_margin(figure.update_layout(showlegend=True), 46 + 24 * max(1, math.ceil(sum(names) / 62)))


def stacked_figure(title: str, height: int) -> go.Figure:
    """Two plots, one above the other, that share their x axis; `height` in px."""
    return set_title(go.Figure(_empty_stack(height)), title)


@cache
def _empty_stack(height: int) -> go.Figure:
    made = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.42, 0.58])
    return made.update_layout(template=TEMPLATE, height=height)


def error_bars(centre: pd.Series, low: npt.ArrayLike, high: npt.ArrayLike) -> dict[str, Any]:
    """Error bars from `low` to `high` about `middle`; none where these are NaN."""
    return {
        "array": np.asarray(high) - centre,
        "arrayminus": centre - np.asarray(low),
        "symmetric": False,
        "thickness": 1,
        "width": 2,
    }
