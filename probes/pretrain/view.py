"""Charts of pretraining: comparison of the trainings."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, TextTable
from headscope.rendering.text import statistics_table
from headscope.runs.aggregation import mean_losses
from headscope.runs.run import Run
from probes.pretrain.declaration import TrainingKey
from probes.pretrain.results import final_checkpoint_labels, variant_table


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The validation losses of several trainings: during training, and of the final models."""
    run = context.run
    if "validation" in run.tables and run.validation["adapter"].nunique() > 1:
        chart = Chart(
            plot_loss_against_first(run.validation),
            "Difference on the same documents after the same number of steps. Below zero, the loss is lower than that "
            "of the first training; bands are 95 % confidence intervals over documents.",
        )
        yield ChartGroup("During training", "Training", [chart], app_pages="/checkpoints")
    finals = final_checkpoint_labels(run)
    if "nll" in run.tables and len({training.variant for training in finals}) > 1:
        yield ChartGroup("Pretraining", "All variants", _variant_listing(run, finals), app_pages="/compare")


def _variant_listing(run: Run, final_labels: Mapping[TrainingKey, str]) -> Iterator[TextTable]:
    first = next(iter(final_labels)).variant
    yield statistics_table(
        f"Validation loss of every variant at its last step, and its difference from {first} with the same seed; 95 % "
        "confidence intervals over documents in brackets",
        variant_table(run, final_labels),
    )


def plot_loss_against_first(validation: pd.DataFrame) -> go.Figure:
    """Validation loss minus that of the first training at the same step (nats/token), with 95 % bands over
    documents."""
    title = "Validation loss relative to the first training"
    if reason := style.missing_data_reason(validation, "adapter", "step", "nll"):
        return style.empty_figure(title, reason)
    rows = validation.astype({"nll": np.float64, "doc": "str"})
    model_styles = style.model_styles(rows.rename(columns={"adapter": "model"}))
    means = pd.DataFrame(mean_losses(rows.astype({"adapter": "str"}), ["adapter", "step", "doc"]).unstack("doc"))
    first, *later = model_styles
    if not later:
        return style.empty_figure(title, "the run has only one training")
    curves = {
        model_styles[label]: shapes.mean_curve(pd.DataFrame(means.loc[label] - means.loc[first]).dropna())
        for label in later
    }
    hover = f"step %{{x}}: %{{y:+.4f}} nats/token relative to {style.escape_label(first)}"
    return shapes.bands(title, curves, hover, "optimiser step", "difference of loss (nats/token)", level=0)
