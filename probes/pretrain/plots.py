"""Trainings from scratch beside each other: held-out loss against the first of them."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.runs.aggregation import confidence_interval, mean_losses


def plot_loss_against_first(validation: pd.DataFrame) -> go.Figure:
    """Held-out loss less the first training's after as many steps (nats/token), with 95 % bands over documents."""
    title = "Held-out loss against the first training"
    if why := style.missing_data_reason(validation, "adapter", "step", "nll"):
        return style.empty_figure(title, why)
    rows = validation.astype({"nll": np.float64, "doc": "str"})
    looks = style.model_styles(rows.rename(columns={"adapter": "model"}))
    means = pd.DataFrame(mean_losses(rows.astype({"adapter": "str"}), ["adapter", "step", "doc"]).unstack("doc"))
    first, *others = looks
    if not others:
        return style.empty_figure(title, "there is no second training")
    made = style.new_figure(title)
    made.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    for label in others:
        gap = pd.DataFrame(means.loc[label] - means.loc[first]).dropna()
        low, high = confidence_interval(gap.to_numpy(dtype=np.float64))
        line = pd.DataFrame({"mean": gap.mean(axis=1), "low": low, "high": high})
        style.add_line_with_band(
            made, line, looks[label], f"step %{{x}}: %{{y:+.4f}} nats/token against {style.escape_label(first)}"
        )
    made.update_xaxes(title_text="optimiser step")
    made.update_yaxes(title_text="difference of loss (nats/token)")
    return style.fit_legend(made)
