"""Next-token loss along the context: how well each model predicts, and by how much it differs from the first."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.aggregation import interval


def plot_loss_by_position(nll: pd.DataFrame) -> go.Figure:
    """Mean loss over documents (nats/token) by position, with a band of one standard deviation over documents, at the
    longest context."""
    title = "Loss by position in the context"
    if why := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, why)
    documents = _losses_by_document(nll)
    made = style.new_figure(title)
    for label, look in style.model_styles(nll).items():
        if label not in documents:
            continue
        block = documents[label]
        mean, deviation = block.mean(axis=1), block.std(axis=1, ddof=1)
        line = pd.DataFrame({"mean": mean, "low": mean - deviation, "high": mean + deviation})
        style.add_line_with_band(made, line, look, "up to position %{x:,}: %{y:.4f} nats/token")
    return _label_axes(made, nll, "loss (nats/token)")


def plot_loss_difference(nll: pd.DataFrame, baseline: str) -> go.Figure:
    """Loss minus that of `baseline` on the same documents (nats/token) by position, with a 95 % band, at the
    longest context.

    Below zero is better than `baseline`. With fewer than three documents there is no band.
    """
    title = f"Loss against {style.escape_label(baseline)}, by position"
    if why := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, why)
    documents = _losses_by_document(nll)
    looks = {label: look for label, look in style.model_styles(nll).items() if label in documents and label != baseline}
    if baseline not in documents or not looks:
        return style.empty_figure(title, "a comparison needs the base model and at least one other")
    made = style.new_figure(title)
    made.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    for label, look in looks.items():
        paired = (documents[label] - documents[baseline]).dropna(axis=1, how="all").dropna()
        low, high = interval(paired.to_numpy(dtype=np.float64))
        line = pd.DataFrame({"mean": paired.mean(axis=1), "low": low, "high": high})
        hover = f"up to position %{{x:,}}: %{{y:+.4f}} nats/token against {style.escape_label(baseline)}"
        style.add_line_with_band(made, line, look, hover)
    return _label_axes(made, nll, "difference of loss (nats/token)")


def _losses_by_document(nll: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By model, the loss at the longest context with a row a position and a column a document."""
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
