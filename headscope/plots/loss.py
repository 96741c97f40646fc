"""Next-token loss by position in the context, and its difference from a baseline."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.aggregation import confidence_interval


def plot_loss_by_position(nll: pd.DataFrame) -> go.Figure:
    """Plot the mean loss over documents (nats/token) by position at the longest context length, one line per model.

    The band is one standard deviation over documents.
    """
    title = "Loss by position in the context"
    if reason := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, reason)
    losses = _losses_by_document(nll)
    figure = style.new_figure(title)
    for label, model_style in style.model_styles(nll).items():
        if label not in losses:
            continue
        model_losses = losses[label]
        mean, deviation = model_losses.mean(axis=1), model_losses.std(axis=1, ddof=1)
        curve = pd.DataFrame({"mean": mean, "low": mean - deviation, "high": mean + deviation})
        style.add_line_with_band(figure, curve, model_style, "up to position %{x:,}: %{y:.4f} nats/token")
    return _label_axes(figure, nll, "loss (nats/token)")


def plot_loss_difference(nll: pd.DataFrame, baseline: str) -> go.Figure:
    """Plot the loss minus the baseline's loss on the same documents (nats/token) by position, one line per model.

    Values below zero are better than the baseline. The context length is the longest one. The band is the 95 %
    confidence interval over documents; with fewer than three documents there is no band.
    """
    title = f"Loss relative to {style.escape_label(baseline)}, by position"
    if reason := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, reason)
    losses = _losses_by_document(nll)
    styles = {
        label: model_style
        for label, model_style in style.model_styles(nll).items()
        if label in losses and label != baseline
    }
    if baseline not in losses or not styles:
        return style.empty_figure(title, "a comparison needs the baseline and at least one other model")
    figure = style.new_figure(title)
    figure.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    for label, model_style in styles.items():
        difference = (losses[label] - losses[baseline]).dropna(axis=1, how="all").dropna()
        low, high = confidence_interval(difference.to_numpy(dtype=np.float64))
        curve = pd.DataFrame({"mean": difference.mean(axis=1), "low": low, "high": high})
        hover = f"up to position %{{x:,}}: %{{y:+.4f}} nats/token relative to {style.escape_label(baseline)}"
        style.add_line_with_band(figure, curve, model_style, hover)
    return _label_axes(figure, nll, "loss difference (nats/token)")


def _losses_by_document(nll: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By model, the loss at the longest context length: one row per position and one column per document."""
    longest = nll[nll["context_length"] == nll["context_length"].max()]
    rows = longest.astype({"model": "str", "doc": "str", "nll": "float64"})
    return {
        str(label): block.groupby(["position", "doc"], observed=True)["nll"].mean().unstack()
        for label, block in rows.groupby("model")
    }


def _label_axes(figure: go.Figure, nll: pd.DataFrame, y_title: str) -> go.Figure:
    figure.update_xaxes(title_text="position (tokens, end of bin)", **axes.log_axis(nll["position"]))
    figure.update_yaxes(title_text=y_title)
    return style.fit_legend(figure)
