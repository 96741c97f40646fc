"""Plots of the budget probe: curves by order, loss by position, size of the KV cache."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, shapes, style
from probes.budget.labels import order_label

MIB = 2**20


def plot_loss_curves(curves: pd.DataFrame, bound: float, title: str) -> go.Figure:
    """Change of the loss (nats/token) by share of streaming KV groups, one line per order; dotted: the bound."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    level = {"level": bound, "level_name": f"bound {bound:g}"}
    return _plot_curves(curves, title, "%{y:+.4f} nats/token", "change of the loss (nats/token)", **level)


def plot_answer_curves(curves: pd.DataFrame, column: str, title: str) -> go.Figure:
    """Success (0 to 1) or change of the answer's loss by share of streaming KV groups, one line per order."""
    if column == "nll":
        return _plot_curves(curves, title, "%{y:+.3f} nats/token", "change of the answer's loss (nats/token)")
    axis = {"title_text": "right answers", "tickformat": ".0%", "range": [-0.03, 1.03]}
    return _plot_curves(curves, title, "%{y:.0%}", axis)


def plot_task_curves(curves: pd.DataFrame, title: str) -> go.Figure:
    """Score on a task by share of streaming KV groups, one line per order."""
    return _plot_curves(curves, title, "%{y:.3f}", "score on the task")


def _plot_curves(curves: pd.DataFrame, title: str, hover: str, y: shapes.Axis, **level: Any) -> go.Figure:
    """A line with its 95 % confidence band per order, by share of streaming KV groups."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    names = curves["order"].map(order_label)
    styled = {
        line_style: curves[names == label].set_index("share").sort_index()[["mean", "low", "high"]]
        for label, line_style in style.line_styles([*dict.fromkeys(names)]).items()
    }
    ticks = {"tickformat": ".0%", "tickvals": np.linspace(0, 1, 6).tolist(), "range": [-0.02, 1.02]}
    x = {"title_text": "KV groups that stream", **ticks}
    return shapes.bands(title, styled, f"%{{x:.1%}} stream: {hover}", x, y, **level)


def plot_loss_by_position(changes: pd.DataFrame, title: str) -> go.Figure:
    """Change of the loss (nats/token) by position, one line per share; `changes` has index position, columns share."""
    if changes.empty:
        return style.empty_figure(title, "no data to plot")
    by_share = {share: pd.DataFrame({"y": changes[share]}) for share in map(float, changes.columns) if share > 0}
    hover = "up to position %{x:,}: %{y:+.4f} nats/token<extra>%{fullData.name} stream</extra>"
    axis = shapes.position_axis(changes.index)
    return shapes.lines(title, _by_share(by_share, ""), hover, axis, "change of the loss (nats/token)")


def plot_cache_sizes(sizes: pd.DataFrame, title: str) -> go.Figure:
    """Size of the KV cache (MiB) by context length, one line per share of streaming KV groups, of one order."""
    if reason := style.missing_data_reason(sizes, "context_length", "share", "cache_bytes"):
        return style.empty_figure(title, reason)
    mebibytes = sizes.assign(y=sizes["cache_bytes"] / MIB).set_index("context_length").sort_index()
    by_share = {share: mebibytes[mebibytes["share"] == share][["y"]] for share in sorted(sizes["share"].unique())}
    hover = "%{x:,} tokens: %{y:.4g} MiB<extra>%{fullData.name} stream</extra>"
    y = {"title_text": "KV cache (MiB)", **axes.log_axis(mebibytes["y"])}
    return shapes.lines(title, _by_share(by_share, "circle"), hover, shapes.length_axis(sizes["context_length"]), y)


def _by_share(tables: Mapping[float, pd.DataFrame], symbol: str) -> shapes.Series:
    """The tables by the style of their share of streaming KV groups."""
    styles = style.ordered_styles([f"{100 * share:.3g} %" for share in tables], symbol)
    return dict(zip(styles.values(), tables.values(), strict=True))
