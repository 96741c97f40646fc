"""One figure that shows one of several, such as the maps of several prompt pairs: a menu selects it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from headscope.plots import style

MENU_HEIGHT = 40
"""Height in px that the menu adds above the plot."""
MENU_LABEL = "menu"
"""Name of the annotation that says what the menu selects."""
MAX_NAME_CHARACTERS = 40
MAX_CHOICES, MAX_CELLS = 32, 250_000
"""Names in a menu, and cells of all its figures together: a page holds all of them."""


def first_choices(sizes: Mapping[str, int]) -> list[str]:
    """The first names, as many as a menu may have; `sizes` are the numbers of cells of their figures."""
    count = int((np.cumsum([*sizes.values()]) <= MAX_CELLS).sum())
    return [*sizes][: max(1, min(count, MAX_CHOICES))]


def describe_choices(shown: int, total: int, nouns: str) -> str:
    """A sentence about the menu to follow a caption; "" without a menu."""
    choice = f"the first {shown:,} of {total:,} {nouns}" if shown < total else f"{total:,} {nouns}"
    return f" The menu selects one of {choice}, which share a colour scale." if shown > 1 else ""


def combine_figures(figures: Mapping[str, go.Figure], noun: str) -> go.Figure:
    """A figure that shows one of `figures` at a time, first the first one, with a menu of their names above the plot.

    `noun` says what they are. This changes the figures. The menu works wherever plotly.js draws the figure.
    """
    combined, *others = figures.values()
    if not others:
        return combined
    heights, tops = zip(*((figure.layout.height, figure.layout.margin.t) for figure in figures.values()), strict=True)
    space = _space_above_plot(combined)
    for figure in figures.values():
        figure.update_layout(height=max(heights) + MENU_HEIGHT, margin_t=max(tops) + MENU_HEIGHT)
        style.add_annotations(figure, [_menu_label(noun, space)])
    owners = [name for name, figure in figures.items() for _ in figure.data]
    layouts = [figure.layout.to_plotly_json() for figure in figures.values()]
    varying = sorted({key for layout in layouts for key in layout if layout[key] != layouts[0].get(key)})
    combined.add_traces([trace for figure in others for trace in figure.data])
    for trace, owner in zip(combined.data, owners, strict=True):
        trace.visible = owner == owners[0]
    buttons = [
        {
            "label": _shorten(name),
            "method": "update",
            "args": [{"visible": [owner == name for owner in owners]}, {key: layout.get(key) for key in varying}],
        }
        for name, layout in zip(figures, layouts, strict=True)
    ]
    place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": space}}
    colours = {"bgcolor": "#f6f7f9", "bordercolor": "rgba(128,128,128,0.6)"}
    combined.layout.updatemenus = [{"buttons": buttons, "font": {"size": 12}, **place, **colours}]
    return combined


def remove_menu(figure: go.Figure) -> go.Figure:
    """A copy of a figure without its menu, for paper; the figure itself if it has none."""
    if not figure.layout.updatemenus:
        return figure
    layout = figure.layout.to_plotly_json()
    del layout["updatemenus"]
    layout["annotations"] = [one for one in layout["annotations"] if one.get("name") != MENU_LABEL]
    layout["height"] -= MENU_HEIGHT
    layout["margin"] = {**layout["margin"], "t": layout["margin"]["t"] - MENU_HEIGHT}
    return go.Figure([trace for trace in figure.data if trace.visible], layout)


def _space_above_plot(figure: go.Figure) -> int:
    """Height in px of what a figure has between its plot and its title: the headings of panels, or a legend."""
    if figure.layout.showlegend:
        return int(figure.layout.margin.t) - style.top_margin(38, figure.layout.title.to_plotly_json())
    return 30 if any(annotation.yref == "paper" for annotation in figure.layout.annotations) else 8


def _menu_label(noun: str, space: int) -> dict[str, Any]:
    """The annotation left of the menu, `space` px above the plot."""
    place = {"x": 0, "xref": "paper", "xanchor": "right", "xshift": -8, "y": 1, "yref": "paper", "yanchor": "bottom"}
    return {**place, "yshift": space + 6, "text": noun, "showarrow": False, "font": {"size": 12}, "name": MENU_LABEL}


def _shorten(name: str) -> str:
    is_long = len(name) > MAX_NAME_CHARACTERS
    return style.escape_label(f"{name[: MAX_NAME_CHARACTERS - 1]}…" if is_long else name)
