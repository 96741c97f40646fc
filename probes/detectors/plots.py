"""Detectors: what one head looks at on random tokens that come twice, against chance and by length."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.aggregation import confidence_interval
from probes.detectors.analysis import KIND_COLUMNS


def mean_over_sequences(rows: pd.DataFrame, *group_columns: str) -> pd.DataFrame:
    """Mean `score` over sequences with its interval `low` .. `high`, and `chance`, by (model, kind and `by`)."""
    told = []
    for names, block in rows.groupby(["model", "kind", *group_columns], observed=True):
        scores = block["score"].to_numpy(np.float64)
        (low,), (high,) = confidence_interval(scores[None]).clip(0, 1)
        told.append((*names, scores.mean(), low, high, block["chance"].mean()))
    return pd.DataFrame(told, columns=["model", "kind", *group_columns, "score", "low", "high", "chance"])


def plot_head_scores(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """A bar for each model and kind at the longest length, chance as a mark; `rows` are the head's of `detectors`."""
    longest = rows[rows["context_length"] == rows["context_length"].max()]
    means = mean_over_sequences(longest.assign(model=longest["model"].astype(pd.CategoricalDtype(models))))
    made = style.new_figure(f"What layer {layer}, head {head} looks at")
    for label, look in style.model_styles(means).items():
        mine = means[means["model"] == label].set_index("kind").reindex(list(KIND_COLUMNS))
        made.add_bar(
            x=list(KIND_COLUMNS),
            y=mine["score"],
            error_y={
                "type": "data",
                "array": (mine["high"] - mine["score"]).fillna(0),
                "arrayminus": (mine["score"] - mine["low"]).fillna(0),
                "color": style.TEXT_COLOUR,
                "thickness": 1,
            },
            customdata=mine["chance"],
            hovertemplate="%{x}: %{y:.3f}, by chance %{customdata:.4f}<extra>" + look.name + "</extra>",
            marker_color=look.colour,
            name=look.name,
        )
    chance = means.groupby("kind", observed=True)["chance"].max().reindex(list(KIND_COLUMNS))
    made.add_scatter(
        x=list(KIND_COLUMNS),
        y=chance,
        mode="markers",
        marker={"symbol": "line-ew", "size": 26, "line": {"color": style.TEXT_COLOUR, "width": 2}},
        hovertemplate="by chance %{y:.4f}<extra></extra>",
        name="chance",
    )
    made.update_yaxes(title_text="mean weight", range=[0, 1])
    return made.update_layout(barmode="group")


def plot_scores_by_length(rows: pd.DataFrame, model: str, layer: int, head: int) -> go.Figure:
    """A line for each kind over the context lengths of one model, with the interval over sequences."""
    title = f"The same by length: {style.escape_label(model)}"
    means = mean_over_sequences(rows[rows["model"] == model], "context_length")
    if means.empty:
        return style.empty_figure(title, "no data to plot")
    made = style.new_figure(title)
    for at, kind in enumerate(KIND_COLUMNS):
        mine = means[means["kind"] == kind].set_index("context_length").rename(columns={"score": "mean"})
        name, colour = kind, style.PALETTE[at]
        look = style.ModelStyle(name, colour, style.LINE_DASHES[at % len(style.LINE_DASHES)], style.MARKER_SYMBOLS[at])
        if len(mine):
            style.add_line_with_band(made, mine[["mean", "low", "high"]], look, "%{x:,} tokens: %{y:.3f}")
    made.update_xaxes(title_text="context length (tokens)", **axes.length_axis(means["context_length"]))
    made.update_yaxes(title_text="mean weight", range=[0, 1])
    return style.fit_legend(made)
