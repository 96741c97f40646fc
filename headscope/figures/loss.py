"""Next-token loss along the context: how well each model predicts, and by how much it differs from the first."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style
from headscope.runs.means import interval


def by_position(nll: pd.DataFrame) -> go.Figure:
    """Mean loss over documents (nats/token) by position, with a band of one standard deviation over documents, at the
    longest context."""
    title = "Loss by position in the context"
    if why := style.lacks(nll, "model", "position", "nll"):
        return style.nothing(title, why)
    documents = _documents(nll)
    made = style.figure(title)
    for label, look in style.looks(nll).items():
        if label not in documents:
            continue
        block = documents[label]
        mean, deviation = block.mean(axis=1), block.std(axis=1, ddof=1)
        line = pd.DataFrame({"mean": mean, "low": mean - deviation, "high": mean + deviation})
        style.band(made, line, look, "up to position %{x:,}: %{y:.4f} nats/token")
    return _finish(made, nll, "loss (nats/token)")


def difference(nll: pd.DataFrame, baseline: str) -> go.Figure:
    """Loss minus that of `baseline` on the same documents (nats/token) by position, with a 95 % band, at the
    longest context.

    Below zero is better than `baseline`. With fewer than three documents there is no band.
    """
    title = f"Loss against {style.text(baseline)}, by position"
    if why := style.lacks(nll, "model", "position", "nll"):
        return style.nothing(title, why)
    documents = _documents(nll)
    looks = {label: look for label, look in style.looks(nll).items() if label in documents and label != baseline}
    if baseline not in documents or not looks:
        return style.nothing(title, "a comparison needs the base model and at least one other")
    made = style.figure(title)
    made.add_hline(y=0, line={"color": style.INK, "dash": "dot", "width": 1})
    for label, look in looks.items():
        paired = (documents[label] - documents[baseline]).dropna(axis=1, how="all").dropna()
        low, high = interval(paired.to_numpy(dtype=np.float64))
        line = pd.DataFrame({"mean": paired.mean(axis=1), "low": low, "high": high})
        hover = f"up to position %{{x:,}}: %{{y:+.4f}} nats/token against {style.text(baseline)}"
        style.band(made, line, look, hover)
    return _finish(made, nll, "difference of loss (nats/token)")


def _documents(nll: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By model, the loss at the longest context with a row a position and a column a document."""
    longest = nll[nll["context_length"] == nll["context_length"].max()]
    rows = longest.astype({"model": "str", "doc": "str", "nll": "float64"})
    return {
        str(label): block.groupby(["position", "doc"], observed=True)["nll"].mean().unstack()
        for label, block in rows.groupby("model")
    }


def _finish(made: go.Figure, nll: pd.DataFrame, y: str) -> go.Figure:
    made.update_xaxes(title_text="position (tokens, end of bin)", **axes.log_axis(nll["position"]))
    made.update_yaxes(title_text=y)
    return style.room_for_legend(made)
