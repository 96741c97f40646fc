"""Plots of one head's detector scores: by kind of key against chance, and by context length."""

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.aggregation import mean_with_interval, plain_types
from probes.detectors.scores import TARGETS


def mean_over_sequences(rows: pd.DataFrame, *group_columns: str) -> pd.DataFrame:
    """Mean `score` over sequences with its interval (`low`, `high`) and mean `chance`, by model, kind and group
    columns."""
    keys = ["model", *group_columns, "kind"]
    by_sequence = plain_types(rows).rename(columns={"sequence": "doc"}).set_index([*keys, "doc"])
    means = mean_with_interval(by_sequence["score"], "score", 0, 1)
    means = means.join(by_sequence.groupby(level=keys)["chance"].mean()).reset_index()
    return means.rename(columns={"score_low": "low", "score_high": "high"}).astype({"model": rows["model"].dtype})


def plot_head_scores(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """One bar per model and kind at the longest length, with chance as a mark; `rows` are the head's of `detectors`."""
    title, rows = f"Detector scores of layer {layer}, head {head}", rows[rows["model"].isin(models)]
    if rows.empty:
        return style.empty_figure(title, "not measured in these models")
    longest = rows[rows["context_length"] == rows["context_length"].max()]
    means = mean_over_sequences(longest.assign(model=longest["model"].astype(pd.CategoricalDtype(models))))
    figure = style.new_figure(title)
    for label, model_style in style.model_styles(means).items():
        by_kind = means[means["model"] == label].set_index("kind").reindex(list(TARGETS))
        figure.add_bar(
            x=list(TARGETS),
            y=by_kind["score"],
            error_y={
                "type": "data",
                "array": (by_kind["high"] - by_kind["score"]).fillna(0),
                "arrayminus": (by_kind["score"] - by_kind["low"]).fillna(0),
                "color": style.TEXT_COLOUR,
                "thickness": 1,
            },
            customdata=by_kind["chance"],
            hovertemplate="%{x}: %{y:.3f}, chance %{customdata:.4f}<extra>" + model_style.name + "</extra>",
            marker_color=model_style.colour,
            name=model_style.name,
        )
    chance = means.groupby("kind", observed=True)["chance"].max().reindex(list(TARGETS))
    figure.add_scatter(
        x=list(TARGETS),
        y=chance,
        mode="markers",
        marker={"symbol": "line-ew", "size": 26, "line": {"color": style.TEXT_COLOUR, "width": 2}},
        hovertemplate="chance %{y:.4f}<extra></extra>",
        name="chance",
    )
    figure.update_yaxes(title_text="mean weight", range=[0, 1])
    return style.fit_legend(figure.update_layout(barmode="group"))


def plot_scores_by_length(means: pd.DataFrame, model: str) -> go.Figure:
    """One line per kind over the context lengths of one model, with the confidence interval over sequences.

    `means` are those of one head, of all models (`mean_over_sequences`).
    """
    title = f"Detector scores by context length: {style.escape_label(model)}"
    means = means[means["model"] == model]
    if means.empty:
        return style.empty_figure(title, "no data to plot")
    figure = style.new_figure(title)
    for index, kind in enumerate(TARGETS):
        line = means[means["kind"] == kind].set_index("context_length").rename(columns={"score": "mean"})
        dash, symbol = style.LINE_DASHES[index % len(style.LINE_DASHES)], style.MARKER_SYMBOLS[index]
        model_style = style.ModelStyle(kind, style.CATEGORY_PALETTE[index], dash, symbol)
        if len(line):
            style.add_line_with_band(figure, line[["mean", "low", "high"]], model_style, "%{x:,} tokens: %{y:.3f}")
    figure.update_xaxes(title_text="context length (tokens)", **axes.length_axis(means["context_length"]))
    figure.update_yaxes(title_text="mean weight", range=[0, 1])
    return style.fit_legend(figure)
