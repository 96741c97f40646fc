"""Bars of a few heads, for the cards of an overview: the top heads of a statistic, and effects of units."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import format_head
from headscope.plots import style
from headscope.plots.line_ends import replace_line_ends
from headscope.runs.column_metadata import statistic

CARD_HEIGHT = 250
"""Height of a figure on a card, in px."""
MAX_CARD_TICKS = 5
"""Labelled ticks of the x axis of a card, which is about 350 px wide."""
MAX_LEGEND_CHARACTERS = 80
"""Total length of the names in a legend on a card."""
RISE_COLOUR, FALL_COLOUR = "#B2182B", "#2166AC"
"""Ends of the diverging colour scale."""


def plot_top_heads(heads: pd.DataFrame, statistic_name: str, top: pd.DataFrame, threshold: float | None) -> go.Figure:
    """Bars of a statistic of the heads of `top` (layer, head, kv_group), one colour per model of `heads`.

    The dotted line is the threshold of a role.
    """
    stat = statistic(statistic_name)
    figure = fit_to_card(style.new_figure(f"{stat.title} of the top heads"))
    names = [format_head(layer, head) for layer, head in zip(top["layer"], top["head"], strict=True)]
    for label, model_style in style.model_styles(heads).items():
        values = heads[heads["model"] == label].set_index(["layer", "head"])[statistic_name]
        figure.add_bar(
            x=names,
            y=values.reindex(pd.MultiIndex.from_frame(top[["layer", "head"]])).to_numpy(np.float64),
            name=model_style.name,
            marker_color=model_style.colour,
            customdata=top[["layer", "head", "kv_group"]].to_numpy().tolist(),
            hovertemplate=f"%{{x}}: {stat.label} %{{y:.3g}}<extra>{model_style.name}</extra>",
        )
    if threshold is not None:
        figure.add_hline(y=threshold, line=style.REFERENCE_LINE)
    figure.update_xaxes(tickfont_size=10)  # labels stay apart on a phone
    figure.update_yaxes(title_text=stat.label)
    figure = hide_long_legend(figure)
    return style.set_metadata(figure if figure.layout.showlegend is False else style.fit_legend(figure), heads=True)


def plot_unit_bars(
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    heads: Sequence[Sequence[int]],
    hover: str,
    model: str,
    intervals: Sequence[tuple[float, float]] = (),
) -> go.Figure:
    """Horizontal bars of signed values of units, (layer, head, kv_group) each: red above zero, blue below.

    `intervals` are the ends of the error bars; a unit whose ends are not finite has none.
    """
    figure = fit_to_card(style.new_figure(title))
    ends = np.array(intervals, np.float64).reshape(-1, 2)
    ends[~np.isfinite(ends).all(axis=1)] = np.nan
    error_bars = style.error_bars(values, *ends.T) if np.isfinite(ends).any() else None
    figure.add_bar(
        x=values,
        y=names,
        orientation="h",
        error_x=error_bars,
        marker_color=[RISE_COLOUR if value > 0 else FALL_COLOUR for value in values],
        customdata=[list(head) for head in heads],
        hovertemplate=f"%{{y}}: {hover}<extra></extra>",
        name=style.escape_label(model),
        showlegend=False,
    )
    figure.update_yaxes(autorange="reversed", title_text=None)
    return style.set_metadata(figure, heads=True, model=style.escape_label(model), y="unit")


def card_picture(figure: go.Figure) -> go.Figure:
    """A copy of the figure of a card without its title, because the question says what it shows, and with few ticks."""
    picture = go.Figure(figure)
    margin = (figure.layout.margin.t or 46) - 21  # the height of the title above the legend
    picture.update_layout(title_text=None, margin_t=max(10, margin))
    for axis in picture.select_xaxes():
        if axis.tickvals is not None and (step := -(-len(axis.tickvals) // MAX_CARD_TICKS)) > 1:
            start = [*axis.tickvals].index(0) % step if 0 in axis.tickvals else 0  # the origin keeps its label
            axis.update(tickvals=axis.tickvals[start::step], ticktext=axis.ticktext and axis.ticktext[start::step])
    replace_line_ends(picture)
    return picture


def fit_to_card(figure: go.Figure) -> go.Figure:
    """Fit a figure to a card, in place, and return it."""
    right = figure.layout.margin.r if figure.layout.showlegend is False and figure.layout.margin.r else 24
    return figure.update_layout(height=CARD_HEIGHT, margin={"l": 74, "r": right, "b": 52})


def hide_long_legend(figure: go.Figure) -> go.Figure:
    """Hide, in place, a legend that would need most of a card, and return the figure; the hover text has the names."""
    names = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    if sum(map(len, names)) > MAX_LEGEND_CHARACTERS:
        figure.update_layout(showlegend=False, margin_t=46)
    return figure
