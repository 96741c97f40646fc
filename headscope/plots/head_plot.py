"""A plot of one head under several models, in two steps, so that the data of many views are computed at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.plots.style import ModelStyle


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
