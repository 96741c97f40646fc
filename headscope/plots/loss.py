"""Next-token loss by position in the context, and its difference from a baseline."""

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.plots.shapes import mean_curve


def plot_loss_by_position(nll: pd.DataFrame) -> go.Figure:
    """Plot the mean loss over documents (nats/token) by position at the longest context length, one line per model.

    The band is one standard deviation over documents.
    """
    title = "Loss by position in the context"
    if reason := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, reason)
    losses = _losses_by_document(nll)
    curves = {}
    for label, model_style in style.model_styles(nll).items():
        if label in losses:
            mean, deviation = losses[label].mean(axis=1), losses[label].std(axis=1, ddof=1)
            curves[model_style] = pd.DataFrame({"mean": mean, "low": mean - deviation, "high": mean + deviation})
    hover = "up to position %{x:,}: %{y:.4f} nats/token"
    return shapes.bands(title, curves, hover, shapes.position_axis(nll["position"]), "loss (nats/token)")


def plot_loss_difference(nll: pd.DataFrame, baseline: str) -> go.Figure:
    """Plot the loss minus the baseline's loss on the same documents (nats/token) by position, one line per model.

    Values below zero are better than the baseline. The context length is the longest one. The band is the 95 %
    confidence interval over documents; with fewer than three documents there is no band.
    """
    title = f"Loss relative to {style.escape_label(baseline)}, by position"
    if reason := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, reason)
    losses = _losses_by_document(nll)
    curves = {
        model_style: mean_curve((losses[label] - losses[baseline]).dropna(axis=1, how="all").dropna())
        for label, model_style in style.model_styles(nll).items()
        if {label, baseline} <= {*losses} and label != baseline
    }
    if not curves:
        return style.empty_figure(title, "a comparison needs the baseline and at least one other model")
    hover = f"up to position %{{x:,}}: %{{y:+.4f}} nats/token relative to {style.escape_label(baseline)}"
    axis = shapes.position_axis(nll["position"])
    return shapes.bands(title, curves, hover, axis, "loss difference (nats/token)", level=0)


def _losses_by_document(nll: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By model, the loss at the longest context length: one row per position and one column per document."""
    longest = nll[nll["context_length"] == nll["context_length"].max()]
    rows = longest.astype({"model": "str", "doc": "str", "nll": "float64"})
    return {
        str(label): block.groupby(["position", "doc"], observed=True)["nll"].mean().unstack()
        for label, block in rows.groupby("model")
    }
