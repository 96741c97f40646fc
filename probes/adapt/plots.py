"""How a training went: the loss of its batches, and the loss on held-out documents along the context."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.aggregation import losses


def plot_training_loss(training: pd.DataFrame) -> go.Figure:
    """Loss of each step's batch (nats/token), a line per training; the symbol tells the length of its sequences."""
    title = "Training loss"
    if why := style.missing_data_reason(training, "adapter", "step", "loss"):
        return style.empty_figure(title, why)
    made = style.new_figure(title)
    lengths = {length: at for at, length in enumerate(sorted(training["context_length"].unique()))}
    for label, look in _training_styles(training).items():
        line = training[training["adapter"] == label].sort_values("step")
        made.add_scatter(
            x=line["step"],
            y=line["loss"],
            mode="lines+markers",
            line={"color": look.colour, "width": 1},
            marker={"symbol": [style.MARKER_SYMBOLS[lengths[n] % 5] for n in line["context_length"]], "size": 6},
            name=look.name,
            showlegend=training["adapter"].nunique() > 1,
            customdata=line["context_length"],
            hovertemplate="step %{x}: %{y:.4f} nats/token in %{customdata:,} tokens<extra></extra>",
        )
    made.update_xaxes(title_text="optimiser step")
    made.update_yaxes(title_text="loss (nats/token)")
    return style.fit_legend(made)


def plot_held_out_loss(validation: pd.DataFrame) -> go.Figure:
    """Held-out loss less that of step 0 (nats/token) against step: the mean over documents and tokens."""
    title = "Held-out loss against step 0"
    if why := style.missing_data_reason(validation, "adapter", "step", "nll"):
        return style.empty_figure(title, why)
    made = style.new_figure(title)
    made.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    for label, look in _training_styles(validation).items():
        mine = validation[validation["adapter"] == label]
        change = _loss_change(mine, ["step", "doc"]).unstack("doc")
        line = pd.DataFrame({"mean": change.mean(axis=1), "low": change.min(axis=1), "high": change.max(axis=1)})
        style.add_line_with_band(made, line, look, "step %{x}: %{y:+.4f} nats/token against step 0")
    made.update_xaxes(title_text="optimiser step")
    made.update_yaxes(title_text="difference of loss (nats/token)")
    return style.fit_legend(made)


def plot_held_out_loss_by_position(validation: pd.DataFrame, adapter: str) -> go.Figure:
    """Held-out loss of one training less that of step 0, by position; a line a kept step."""
    title = f"Held-out loss along the context: {style.escape_label(adapter)}"
    if why := style.missing_data_reason(validation, "adapter", "step", "nll", "position"):
        return style.empty_figure(title, why)
    mine = validation[validation["adapter"] == adapter]
    change = _loss_change(mine, ["step", "position"]).unstack("step")
    made = style.new_figure(title)
    made.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    steps = [step for step in sorted(mine["step"].unique()) if step > 0]
    shades = style.ordered_colours(len(steps))
    for step, shade in zip(steps, shades, strict=True):
        made.add_scatter(
            x=change.index,
            y=change[step],
            mode="lines",
            line={"color": shade},
            name=f"step {step}",
            hovertemplate=f"step {step}, up to position %{{x:,}}: %{{y:+.4f}} nats/token<extra></extra>",
        )
    made.update_xaxes(title_text="position (tokens, end of bin)", **axes.log_axis(mine["position"]))
    made.update_yaxes(title_text="difference of loss (nats/token)")
    return style.fit_legend(made)


def _training_styles(frame: pd.DataFrame) -> dict[str, style.ModelStyle]:
    return style.model_styles(frame.rename(columns={"adapter": "model"}))


def _loss_change(rows: pd.DataFrame, key_columns: list[str]) -> pd.Series:
    """Mean loss per token by the keys `by`, the first of which is step, less that of step 0."""
    rows = rows.astype({"nll": np.float64, "doc": "str"})
    means = losses(rows, key_columns)
    change: pd.Series = means.sub(means.xs(0, level="step"), level=key_columns[1])
    return change
