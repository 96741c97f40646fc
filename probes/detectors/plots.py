"""Plots of one head's detector scores: by kind of key against chance, and by context length."""

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.runs.aggregation import mean_with_interval, plain_types
from probes.detectors.scores import TARGETS

WEIGHT_AXIS = {"title_text": "mean weight", "range": [0, 1]}


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
    columns, hover = {"score": "y", "chance": "customdata"}, "%{x}: %{y:.3f}, chance %{customdata:.4f}"
    for label, model_style in style.model_styles(means).items():
        by_kind = means[means["model"] == label].set_index("kind").reindex(list(TARGETS))
        table = by_kind.rename(columns=columns)[["y", "low", "high", "customdata"]]
        figure.add_traces([shapes.bar_trace(model_style, table, hover)])
    chance = means.groupby("kind", observed=True)["chance"].max().reindex(list(TARGETS))
    figure.add_scatter(
        x=list(TARGETS),
        y=chance,
        mode="markers",
        marker={"symbol": "line-ew", "size": 26, "line": {"color": style.TEXT_COLOUR, "width": 2}},
        hovertemplate="chance %{y:.4f}<extra></extra>",
        name="chance",
    )
    figure.update_traces(error_y_color=style.TEXT_COLOUR, selector={"type": "bar"})
    return shapes.finish(figure.update_layout(barmode="group"), {}, WEIGHT_AXIS)


def plot_scores_by_length(means: pd.DataFrame, model: str) -> go.Figure:
    """One line per kind over the context lengths of one model, with the confidence interval over sequences.

    `means` are those of one head, of all models (`mean_over_sequences`).
    """
    title = f"Detector scores by context length: {style.escape_label(model)}"
    means = means[means["model"] == model]
    if means.empty:
        return style.empty_figure(title, "no data to plot")
    by_length = means.rename(columns={"score": "mean"}).set_index("context_length")
    curves = {
        kind_style: by_length.loc[by_length["kind"] == kind, ["mean", "low", "high"]]
        for kind, kind_style in style.line_styles([*TARGETS]).items()
        if (by_length["kind"] == kind).any()
    }
    axis = shapes.length_axis(means["context_length"])
    return shapes.bands(title, curves, "%{x:,} tokens: %{y:.3f}", axis, WEIGHT_AXIS)
