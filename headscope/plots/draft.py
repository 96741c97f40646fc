"""A figure under construction as plain plotly settings.

Plotly checks and copies its settings at every change of a figure, which takes most of the time of a chart. Plots that
are drawn for every head and model change a draft, which becomes a figure once.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from headscope.compat.plotly import unchecked_figure
from headscope.plots import style
from headscope.plots.line_ends import Settings
from headscope.plots.style import ModelStyle


class Draft:
    """Traces and layout as plotly stores them (see `compat.plotly.unchecked_figure`)."""

    def __init__(self, layout: Settings, title: str) -> None:
        self.traces: list[Settings] = []
        self.layout = {**layout, "title": style.title_settings(title)}

    @classmethod
    def single(cls, title: str, height: int = 380) -> "Draft":
        """One plot, as `style.new_figure`; `height` in px."""
        return cls({"template": _template(), "height": height}, title)

    @classmethod
    def stacked(cls, title: str, height: int) -> "Draft":
        """Two plots above each other with a shared x axis; `height` in px."""
        return cls(deepcopy(_stacked_layout(height)) | {"template": _template()}, title)

    @classmethod
    def panels(cls, title: str, panel_titles: Sequence[str], columns: int = 3, height: int = 330) -> "Draft":
        """Small multiples, as `style.panel_figure`; `height` in px of a row of panels."""
        draft = cls(deepcopy(_panel_layout(len(panel_titles), columns, height)) | {"template": _template()}, title)
        for annotation, panel_title in zip(draft.layout["annotations"], panel_titles, strict=True):
            annotation["text"] = panel_title
        return draft.set_top_margin(98)

    def figure(self) -> go.Figure:
        """The figure."""
        return unchecked_figure({"data": self.traces, "layout": self.layout})

    def with_traces(self, traces: Sequence[Settings]) -> "Draft":
        """A draft with further traces and the same layout; this one stays as it is."""
        draft = copy(self)
        draft.traces = [*self.traces, *traces]
        return draft

    def add(self, traces: Sequence[Settings], panel: int | None = None) -> None:
        """Add traces to the panel of this number, from 1; a single plot has no panels."""
        self.traces += [trace | _axes_of(panel) for trace in traces]

    def update_axis(self, name: str, settings: Mapping[str, Any]) -> None:
        """Change settings of an axis, such as "xaxis2"."""
        self.layout[name] = self.layout.get(name, {}) | settings

    def update_axes(self, letter: str, settings: Mapping[str, Any]) -> None:
        """Change settings of all x axes or all y axes of small multiples."""
        for name in [name for name in self.layout if name.startswith(f"{letter}axis")]:
            self.update_axis(name, settings)

    def set_outer_axis_titles(self, panel_count: int, x_title: str, y_title: str, columns: int = 3) -> None:
        """Set axis titles only at the edge, as `style.set_outer_axis_titles`."""
        for name, settings in style.outer_axis_settings(panel_count, x_title, y_title, columns):
            self.update_axis(name, settings)

    def set_top_margin(self, space: int = 46) -> "Draft":
        """Set the space above the plot in px, plus the height of further title lines."""
        self.layout["margin"] = self.layout.get("margin", {}) | {"t": style.top_margin(space, self.layout["title"])}
        return self

    def fit_legend(self) -> "Draft":
        """Name the lines at their ends or make space for the legend, as `style.fit_legend`."""
        self.layout |= style.legend_settings(self.traces, self.set_top_margin().layout)
        return self


def _axes_of(panel: int | None) -> dict[str, str]:
    number = "" if panel in (None, 1) else panel
    return {} if panel is None else {"xaxis": f"x{number}", "yaxis": f"y{number}"}


@cache
def _template() -> Settings:
    settings: Settings = style.TEMPLATE.to_plotly_json()
    return settings


@cache
def _stacked_layout(height: int) -> Settings:
    figure = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.42, 0.58])
    return _without_template(figure.update_layout(template=style.TEMPLATE, height=height))


@cache
def _panel_layout(panel_count: int, columns: int, height: int) -> Settings:
    return _without_template(style.empty_panels(panel_count, columns, height))


def _without_template(figure: go.Figure) -> Settings:
    layout: Settings = figure.layout.to_plotly_json()
    del layout["template"]
    return layout


@dataclass(frozen=True)
class HeadPlot:
    """A plot of one head from a table of the run.

    `prepare` computes the data of each model from rows of the table; `draw` draws those of the models in the styles.
    Without values in `columns` a model has no data. The head follows in the title.
    """

    table: str
    columns: tuple[str, ...]
    title: str
    prepare: Callable[[pd.DataFrame, int, int], Mapping[str, Any]]
    draw: Callable[[Mapping[str, Any], Mapping[str, ModelStyle], int, int], go.Figure]

    def title_of(self, layer: int, head: int) -> str:
        """The title for one head."""
        return f"{self.title} layer {layer}, head {head}"

    def plot(self, rows: pd.DataFrame, layer: int, head: int) -> go.Figure:
        """The figure from rows of the table, under their models; without data, it gives the reason."""
        title = self.title_of(layer, head)
        if reason := style.missing_data_reason(rows, *self.columns):
            return style.empty_figure(title, reason)
        of_head = rows[(rows["layer"] == layer) & (rows["head"] == head)]
        if of_head.empty:
            return style.empty_figure(title, "this head was not measured")
        return self.draw(self.prepare(of_head, layer, head), style.model_styles(of_head), layer, head)
