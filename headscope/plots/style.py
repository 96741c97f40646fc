"""Figure style: a plotly template for light and dark pages, colour-blind safe colours, and layout helpers.

This module knows plotly and nothing about runs. Text is mid grey and the background is transparent; a page may set the
text colour with CSS. Labels from users pass through `escape_label`, because plotly interprets a subset of HTML.
"""

import html
import math
import re
import textwrap
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import diverging, sample_colorscale, sequential
from plotly.subplots import make_subplots

from headscope.plots.line_ends import Settings, line_end_settings

Title = str | Mapping[str, Any]
"""The text of a title, or its plotly settings, as from `title_with_subtitle`."""

GRAPH_CONFIG: Mapping[str, Any] = {
    "showSendToCloud": False,  # plotly 7 shows an upload button by default
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "headscope"},
}
"""Plotly config for every figure."""

TEXT_COLOUR = "#777777"
GRID_COLOUR = "rgba(128,128,128,0.22)"
SEQUENTIAL_SCALE = sequential.Viridis
DIVERGING_SCALE = diverging.RdBu_r
ORDERED_SCALE = ("rgb(46,114,184)", "rgb(138,99,192)", "rgb(194,85,157)", "rgb(207,106,46)")
"""Colours of lines in an order, all of middle luminance."""
PALETTE = ("#1F83C4", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B8A900", "#8C8C8C")
"""The colours of Okabe and Ito; blue is lighter and black is grey for dark pages, yellow is darker for light pages."""
CATEGORY_PALETTE = ("#6A5ACD", "#C2185B", "#5F8A00", "#00838F", "#8B5A2B", "#9575CD", "#F06292", "#A1887F")
"""Colours of everything that is no model: kinds, roles, rules, single heads. None is in `PALETTE`, whose colours always
name models."""
HIGHLIGHT_COLOUR = "#C2185B"
"""Colour of the one element that a figure emphasises."""
TITLE_WIDTH, SUBTITLE_WIDTH, TITLE_LINE_HEIGHT, SUBTITLE_LINE_HEIGHT = 60, 56, 20, 16
"""Characters per line of a title, in a chart of half the page width, and of a subtitle, in the narrowest one of 360
px; height in px of each further line of either. The app wraps titles again in narrower charts."""
LEVEL_LABEL_CHARACTERS, UPRIGHT_LABELS, SLANTED_SHARE = 28, 48, 0.4
"""Characters of tick labels that have room side by side, upright labels that have room below a chart, and the share of
these up to which labels are slanted."""
LINE_DASHES = ("solid", "dash", "dot", "dashdot")
REFERENCE_LINE = {"color": TEXT_COLOUR, "dash": "dot", "width": 1}
"""Plotly settings of a line that is no data."""
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
_COLORBAR_STYLE = {"x": 1, "thickness": 12, "outlinewidth": 0, "ticks": "outside", "title": {"font": {"size": 12}}}
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
        # Wide enough for most tick labels: plotly draws a chart twice if it has to widen the margins.
        "margin": {"l": 80, "r": 32, "t": 70, "b": 56},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,128,128,0.5)", "activecolor": TEXT_COLOUR},
    },
)


@dataclass(frozen=True)
class ModelStyle:
    """Line and marker style of one model in every figure."""

    name: str
    colour: str
    dash: str
    symbol: str
    model_count: int = field(default=1, compare=False)
    """Number of models in the figure."""

    @property
    def fill_colour(self) -> str:
        """The colour as a translucent fill."""
        return self._rgba(0.16)

    @property
    def band_colour(self) -> str:
        """The colour as the fill of a band; fainter with more models, because the bands overlap."""
        return self._rgba(min(0.16, 0.4 / self.model_count))

    def _rgba(self, opacity: float) -> str:
        red, green, blue = (int(self.colour[start : start + 2], 16) for start in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity:.3g})"


UNNAMED = ModelStyle("", CATEGORY_PALETTE[0], "", "")
"""Style of the only line or bars of a figure."""
PREFERRED_STYLES: Mapping[str, int] = MappingProxyType(
    {"base": 0, "yarn": 1, "adarope": 3, "linear": 4, "ntk": 5, "llama3": 6, "abf": 7, "nope": 7, "alibi": 6, "logn": 2}
)
"""Style number of a model whose label starts with the name of a position scheme."""


def model_styles(frame: pd.DataFrame) -> dict[str, ModelStyle]:
    """Styles of the models in `frame`, in order.

    A model has the same style in every run: that of the position scheme that its label starts with, else one that
    follows from the label. If two models of a run prefer one style, the later one takes the next free style.
    """
    if frame.empty or "model" not in frame:
        return {}
    column = frame["model"]
    present = [*column.unique()]
    return styles_of(present, [*column.cat.categories] if isinstance(column.dtype, pd.CategoricalDtype) else present)


def styles_of(present: Collection[str], order: Sequence[str]) -> dict[str, ModelStyle]:
    """Styles of the models `present` in a figure, as `model_styles`; `order` has them among the others of the run."""
    return {
        label: _numbered_style(label, number, len(present))
        for label, number in _style_numbers(order).items()
        if label in present
    }


def line_styles(labels: Sequence[str]) -> dict[str, ModelStyle]:
    """Styles of lines that are not models, in the order of their palette."""
    return {label: _numbered_style(label, number, len(labels), CATEGORY_PALETTE) for number, label in enumerate(labels)}


def _numbered_style(label: str, number: int, count: int, palette: Sequence[str] = PALETTE) -> ModelStyle:
    return ModelStyle(
        escape_label(label), palette[number % 8], LINE_DASHES[number % 4], MARKER_SYMBOLS[number % 5], count
    )


def _style_numbers(labels: Sequence[str]) -> dict[str, int]:
    """The style number of each label, all different."""
    numbers: dict[str, int] = {}
    preferred = {label: _preferred_style(str(label)) for label in labels}
    # A label that is the name of a scheme keeps its style beside longer labels of that scheme.
    for label in sorted(labels, key=lambda label: str(label) not in PREFERRED_STYLES):
        taken = {*numbers.values()}
        cycle = next(cycle for cycle in count() if len({8 * cycle + step for step in range(8)} - taken))
        free = (8 * cycle + (preferred[label] + step) % 8 for step in range(8))
        numbers[label] = next(number for number in free if number not in taken)
    return {label: numbers[label] for label in labels}


def _preferred_style(label: str) -> int:
    """The style number that a label prefers, 0 to 7."""
    first_word = re.split("[^a-z0-9]", label.partition(" \u00b7 ")[0].lower())[0]
    return PREFERRED_STYLES.get(first_word, zlib.crc32(label.encode()) % 8)


def category_styles(labels: Sequence[str], palette: Sequence[str] = CATEGORY_PALETTE) -> dict[str, ModelStyle]:
    """Styles of lines that are not models, with a new dash after each round of the palette."""
    return {
        label: ModelStyle(
            escape_label(label), palette[number % 8], LINE_DASHES[number // 8 % 4], MARKER_SYMBOLS[number % 5]
        )
        for number, label in enumerate(labels)
    }


def ordered_styles(labels: Sequence[str], symbol: str = "") -> dict[str, ModelStyle]:
    """Styles of lines in an order, all solid, with this marker or none."""
    colours = ordered_colours(len(labels))
    return {label: ModelStyle(label, colour, "", symbol) for label, colour in zip(labels, colours, strict=True)}


def ordered_colours(colour_count: int) -> list[str]:
    """Colours for an ordered series, from blue to orange; each is visible on light and on dark pages."""
    shares = [index / max(1, colour_count - 1) for index in range(colour_count)]
    colours: list[str] = sample_colorscale(ORDERED_SCALE, shares)
    return colours


def escape_label(label: object, width: int = 40) -> str:
    """Escape HTML in a label and wrap it to lines of at most `width` characters, as plotly text."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(str(label), width)) or " "


def new_figure(title: Title, height: int = 380) -> go.Figure:
    """An empty figure with the headscope template; `height` in px."""
    return set_title(go.Figure(layout={"template": TEMPLATE, "height": height}), title)


def set_title(figure: go.Figure, title: Title) -> go.Figure:
    """Set the title in place, wrapped for a chart of half the page width, and return the figure."""
    figure.layout.title = title_settings(title if isinstance(title, str) else "")
    return figure if isinstance(title, str) else figure.update_layout(title=title)


def title_settings(title: str) -> dict[str, Any]:
    """Plotly settings of a title, wrapped for a chart of half the page width."""
    title_text = escape_label(html.unescape(title.replace("<br>", " ")), TITLE_WIDTH)
    return {"text": title_text, "pad": {"t": TITLE_LINE_HEIGHT * title_text.count("<br>")}}


def title_with_subtitle(text: str, subtitle: str) -> dict[str, object]:
    """Plotly settings of a title with a smaller text below it; the title is plotly text. Both are wrapped."""
    font = {"size": 12, "color": TEXT_COLOUR}
    return title_settings(text) | {"subtitle": {"text": escape_label(subtitle, SUBTITLE_WIDTH), "font": font}}


def set_top_margin(figure: go.Figure, space: int = 46) -> go.Figure:
    """Set the space above the plot in px, plus the height of further title lines, and return the figure."""
    figure.layout.margin.t = top_margin(space, figure.layout.title.to_plotly_json())
    return figure


def top_margin(space: int, title: Mapping[str, Any]) -> int:
    """The top margin in px that leaves this space above the plot, besides further lines of title and subtitle."""
    lines, further_lines = (item.get("text", "").count("<br>") for item in (title, title.get("subtitle", {})))
    return int(space + TITLE_LINE_HEIGHT * lines + SUBTITLE_LINE_HEIGHT * further_lines)


def panel_figure(title: str, panel_titles: Sequence[str], columns: int = 3, height: int = 330) -> go.Figure:
    """Small multiples with shared axes and a title above each panel; `height` is that of a row of panels, in px."""
    figure = set_title(go.Figure(empty_panels(len(panel_titles), columns, height)), title)
    for annotation, panel_title in zip(figure.layout.annotations, panel_titles, strict=True):
        annotation.text = panel_title
    return set_top_margin(figure, 98)


@cache
def empty_panels(panel_count: int, columns: int, height: int) -> go.Figure:
    """Empty panels; cached, because a copy takes a tenth of the time of plotly's layout."""
    row_length = min(columns, panel_count)
    row_count = math.ceil(panel_count / row_length)
    figure = make_subplots(
        row_count,
        row_length,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=["name"] * panel_count,
        horizontal_spacing=0.06 if row_length > 1 else 0.0,
        vertical_spacing=0.22 / row_count if row_count > 1 else 0.0,
    )
    total = height * row_count + 60
    legend = {"yref": "container", "y": 1 - 36 / total, "yanchor": "top"}
    return figure.update_layout(template=TEMPLATE, height=total, legend=legend).update_annotations(font_size=13)


def panel_row_col(index: int, panels: Sized, columns: int = 3) -> dict[str, int]:
    """Row and column of panel `index`, as keyword arguments of plotly's `add_trace`."""
    row_length = min(columns, len(panels))
    return {"row": index // row_length + 1, "col": index % row_length + 1}


def set_outer_axis_titles(figure: go.Figure, panel_count: int, x_title: str, y_title: str, columns: int = 3) -> None:
    """Set axis titles only at the edge: x below the lowest panel of each column, y left of each row."""
    for name, settings in outer_axis_settings(panel_count, x_title, y_title, columns):
        figure.layout[name].update(settings)  # `update_xaxes` finds axes slowly


def outer_axis_settings(
    panel_count: int, x_title: str, y_title: str, columns: int = 3
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The axes at the edge of small multiples, by name, with the plotly settings of their titles."""
    row_length = min(columns, panel_count)
    for index in range(panel_count):
        number = index + 1 if index else ""
        if index + row_length >= panel_count:
            yield f"xaxis{number}", {"title": {"text": x_title}, "showticklabels": True}
        if index % row_length == 0:
            yield f"yaxis{number}", {"title": {"text": y_title}}


def empty_figure(title: str, reason: str) -> go.Figure:
    """An empty figure that states the reason."""
    figure = new_figure(title, 200)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=reason, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font_size=14)
    return figure


def missing_data_reason(frame: pd.DataFrame, *required_columns: str) -> str:
    """Why `frame` cannot be plotted: missing columns or no data; "" if it can."""
    if missing := ", ".join(name for name in required_columns if name not in frame):
        return f"not measured: {escape_label(missing)}"
    missing_values = [frame[name].isna().to_numpy() for name in required_columns]
    return "" if len(frame) and not np.logical_or.reduce(missing_values).all() else "no data to plot"


def declare_head_points(figure: go.Figure) -> go.Figure:
    """Declare that points are heads: `customdata` starts with layer, head (-1: whole KV group) and KV group."""
    for trace in figure.data:
        if trace.type == "scatter" and trace.customdata is not None:
            # Dash cannot read packed arrays in selections; plotly packs no array of objects, and checks its shape only.
            # plotly ignores an equal value, so clear it first.
            customdata, trace.customdata = np.asarray(trace.customdata, object), None
            trace.customdata = customdata
    return set_metadata(figure, heads=True)


def set_metadata(figure: go.Figure, **metadata: object) -> go.Figure:
    """Describe the numbers of the figure for the export as a table, and return the figure.

    `value` names the numbers, `x` and `y` name the axes (of a matrix of heads those that are neither layer nor head),
    `model` is the model of traces whose names are not models, and `value_index` is the position of the number in
    `customdata` if the colour shows a transformed value.
    """
    figure.layout.meta = {**(figure.layout.meta or {}), **metadata}
    return figure


def add_annotations(figure: go.Figure, annotations: Iterable[Mapping[str, object]]) -> None:
    """Add annotations at once: plotly checks all of a figure's annotations again whenever one is added."""
    figure.layout.annotations = [*figure.layout.annotations, *annotations]


def turned_labels(labels: Sequence[str], room: int = UPRIGHT_LABELS) -> dict[str, Any]:
    """Plotly settings of a horizontal axis with these tick labels: level if they are short, else slanted, and upright
    if there are many. `room` is the number of upright labels that have room."""
    is_level = sum(len(label) + 2 for label in labels) <= LEVEL_LABEL_CHARACTERS
    angle = 0 if is_level else -60 if len(labels) <= SLANTED_SHARE * room else -90
    return {"tickangle": angle, "tickfont": {"size": 11}}


def unit_suffix(unit: str) -> str:
    """The unit with a leading space, or ""."""
    return f" {unit}" if unit else ""


def add_line_with_band(figure: go.Figure, curve: pd.DataFrame, model_style: ModelStyle, hover: str) -> None:
    """Add column `mean` of `curve` against its index, with a band from `low` to `high` where these are finite.

    Further columns are properties of the line, such as `text`.
    """
    if len(bounds := curve[["low", "high"]].dropna()):
        figure.add_traces(band_traces(bounds, model_style))
    line = {
        **{name: curve[name].tolist() for name in curve.columns.drop(["mean", "low", "high"])},
        "type": "scatter",
        "x": curve.index.to_numpy(),
        "y": curve["mean"].to_numpy(),
        "mode": "lines+markers",
        "marker": {"size": 5, "symbol": model_style.symbol},
        "line": {"color": model_style.colour, "dash": model_style.dash},
        "name": model_style.name,
        "legendgroup": model_style.name,
        "hovertemplate": f"{hover}<extra>{model_style.name}</extra>",
    }
    figure.add_traces([line])  # half the time of `add_scatter`, which checks each trace twice


def band_traces(bounds: pd.DataFrame, model_style: ModelStyle) -> list[dict[str, Any]]:
    """The two traces of a band from column `low` to column `high` of `bounds` against its index."""
    edge = {
        "type": "scatter",
        "x": bounds.index.to_numpy(),
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": model_style.name,
    }
    low = {**edge, "y": bounds["low"].to_numpy()}
    high = {**edge, "y": bounds["high"].to_numpy(), "fill": "tonexty", "fillcolor": model_style.band_colour}
    return [low, high]


def fit_legend(figure: go.Figure) -> go.Figure:
    """Name the lines at their ends, or else make room, once, for a legend between the title and the plots."""
    traces = [trace.to_plotly_json() for trace in figure.data]
    settings = legend_settings(traces, set_top_margin(figure).layout.to_plotly_json())
    if "annotations" in settings:
        figure.layout.annotations = settings.pop("annotations")  # `update_layout` would add none to those that exist
    return figure.update_layout(settings)


def legend_settings(traces: Sequence[Settings], layout: Settings) -> Settings:
    """The layout settings that name the lines at their ends, or else make room for a legend above the plots.

    A row of the legend holds about 58 characters in a chart of half the page width, 110 in one with several panels.
    """
    if (settings := line_end_settings(traces, layout)) is not None:
        return settings
    names = [trace["name"] for trace in traces if trace.get("name") and trace.get("showlegend") is not False]
    has_panels = layout.get("legend", {}).get("yref") == "container"
    rows = max(1, math.ceil(sum(len(name) + 7 for name in names) / (110 if has_panels else 58)))
    top = top_margin((74 if has_panels else 46) + 24 * rows, layout["title"])
    return {"showlegend": True, "height": layout["height"] + 24 * (rows - 1), "margin": {**layout["margin"], "t": top}}


def error_bars(centre: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> dict[str, Any]:
    """Plotly settings of error bars from `low` to `high` around `centre`; NaN gives no bar."""
    return {
        "array": np.asarray(high) - np.asarray(centre),
        "arrayminus": np.asarray(centre) - np.asarray(low),
        "symmetric": False,
        "thickness": 1,
        "width": 2,
    }
