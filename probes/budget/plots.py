"""Plots of the budget probe: curves by order, loss by position, size of the KV cache."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from probes.budget.labels import order_label

MIB = 2**20


def plot_loss_curves(curves: pd.DataFrame, bound: float, title: str) -> go.Figure:
    """Change of the loss (nats/token) by share of streaming KV groups, one line per order; dotted: the bound."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    figure = style.new_figure(title)
    _add_curves(figure, curves, "%{x:.1%} stream: %{y:+.4f} nats/token")
    line = {"color": style.TEXT_COLOUR, "dash": "dot", "width": 1}
    figure.add_hline(y=bound, line=line, annotation_text=f"bound {bound:g}")
    figure.update_yaxes(title_text="change of the loss (nats/token)")
    return _label_share_axis(figure)


def plot_answer_curves(curves: pd.DataFrame, column: str, title: str) -> go.Figure:
    """Success (0 to 1) or change of the answer's loss by share of streaming KV groups, one line per order."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    figure = style.new_figure(title)
    is_loss = column == "nll"
    _add_curves(figure, curves, f"%{{x:.1%}} stream: %{{y:{'+.3f} nats/token' if is_loss else '.0%}'}")
    axis = {"title_text": "change of the answer's loss (nats/token)"} if is_loss else {"title_text": "right answers"}
    figure.update_yaxes(**axis, **({} if is_loss else {"tickformat": ".0%", "range": [-0.03, 1.03]}))
    return _label_share_axis(figure)


def plot_task_curves(curves: pd.DataFrame, title: str) -> go.Figure:
    """Score on a task by share of streaming KV groups, one line per order."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    figure = style.new_figure(title)
    _add_curves(figure, curves, "%{x:.1%} stream: %{y:.3f}")
    figure.update_yaxes(title_text="score on the task")
    return _label_share_axis(figure)


def plot_loss_by_position(changes: pd.DataFrame, title: str) -> go.Figure:
    """Change of the loss (nats/token) by position, one line per share; `changes` has index position, columns share."""
    if changes.empty:
        return style.empty_figure(title, "no data to plot")
    figure = style.new_figure(title)
    shares = [share for share in map(float, changes.columns) if share > 0]
    for share, colour in zip(shares, style.ordered_colours(len(shares)), strict=True):
        figure.add_scatter(
            x=changes.index,
            y=changes[share],
            mode="lines",
            name=_share_name(share),
            line={"color": colour},
            hovertemplate=f"up to position %{{x:,}}: %{{y:+.4f}} nats/token<extra>{_share_name(share)} stream</extra>",
        )
    figure.update_xaxes(title_text="position (tokens, end of bin)", **axes.log_axis(changes.index))
    figure.update_yaxes(title_text="change of the loss (nats/token)")
    return style.fit_legend(figure)


def plot_cache_sizes(sizes: pd.DataFrame, title: str) -> go.Figure:
    """Size of the KV cache (MiB) by context length, one line per share of streaming KV groups, of one order."""
    if reason := style.missing_data_reason(sizes, "context_length", "share", "cache_bytes"):
        return style.empty_figure(title, reason)
    figure = style.new_figure(title)
    shares = sorted(sizes["share"].unique())
    for share, colour in zip(shares, style.ordered_colours(len(shares)), strict=True):
        line = sizes[sizes["share"] == share].sort_values("context_length")
        figure.add_scatter(
            x=line["context_length"],
            y=line["cache_bytes"] / MIB,
            mode="lines+markers",
            name=_share_name(share),
            line={"color": colour},
            hovertemplate=f"%{{x:,}} tokens: %{{y:.4g}} MiB<extra>{_share_name(share)} stream</extra>",
        )
    figure.update_xaxes(title_text="context length (tokens)", **axes.length_axis(sizes["context_length"]))
    figure.update_yaxes(title_text="KV cache (MiB)", **axes.log_axis(sizes["cache_bytes"] / MIB))
    return style.fit_legend(figure)


def _add_curves(figure: go.Figure, curves: pd.DataFrame, hover: str) -> None:
    """One line with its 95 % confidence band per order; colours follow the order of the run."""
    names = curves["order"].map(order_label)
    for label, line_style in style.line_styles(_labels(curves)).items():
        line = curves[names == label].set_index("share").sort_index()
        style.add_line_with_band(figure, line[["mean", "low", "high"]], line_style, hover)


def _share_name(share: float) -> str:
    return f"{100 * share:.3g} %"


def _labels(curves: pd.DataFrame) -> list[str]:
    return [order_label(order) for order in dict.fromkeys(curves["order"])]


def _label_share_axis(figure: go.Figure) -> go.Figure:
    ticks = np.linspace(0, 1, 6).tolist()
    figure.update_xaxes(title_text="KV groups that stream", tickformat=".0%", tickvals=ticks, range=[-0.02, 1.02])
    return style.fit_legend(figure)
