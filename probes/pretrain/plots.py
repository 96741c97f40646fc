"""Plot that compares the validation losses of several trainings."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.runs.aggregation import confidence_interval, mean_losses


def plot_loss_against_first(validation: pd.DataFrame) -> go.Figure:
    """Validation loss minus that of the first training at the same step (nats/token), with 95 % bands over
    documents."""
    title = "Validation loss relative to the first training"
    if why := style.missing_data_reason(validation, "adapter", "step", "nll"):
        return style.empty_figure(title, why)
    rows = validation.astype({"nll": np.float64, "doc": "str"})
    looks = style.model_styles(rows.rename(columns={"adapter": "model"}))
    means = pd.DataFrame(mean_losses(rows.astype({"adapter": "str"}), ["adapter", "step", "doc"]).unstack("doc"))
    first, *later = looks
    if not later:
        return style.empty_figure(title, "the run has only one training")
    figure = style.new_figure(title)
    figure.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    for label in later:
        difference = pd.DataFrame(means.loc[label] - means.loc[first]).dropna()
        low, high = confidence_interval(difference.to_numpy(dtype=np.float64))
        line = pd.DataFrame({"mean": difference.mean(axis=1), "low": low, "high": high})
        hover = f"step %{{x}}: %{{y:+.4f}} nats/token relative to {style.escape_label(first)}"
        style.add_line_with_band(figure, line, looks[label], hover)
    figure.update_xaxes(title_text="optimiser step")
    figure.update_yaxes(title_text="difference of loss (nats/token)")
    return style.fit_legend(figure)
