"""Charts of a training: the loss of its batches, and the validation loss by step and by position."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext
from headscope.runs.aggregation import mean_losses

DIFFERENCE = "difference of loss (nats/token)"


def plot_training_loss(training: pd.DataFrame) -> go.Figure:
    """Loss of each step's batch (nats/token), one line per training; the symbol shows the sequence length."""
    title = "Training loss"
    if reason := style.missing_data_reason(training, "adapter", "step", "loss"):
        return style.empty_figure(title, reason)
    figure = style.new_figure(title)
    symbol_index = {length: index for index, length in enumerate(sorted(training["context_length"].unique()))}
    for label, model_style in _training_styles(training).items():
        line = training[training["adapter"] == label].sort_values("step")
        figure.add_scatter(
            x=line["step"],
            y=line["loss"],
            mode="lines+markers",
            line={"color": model_style.colour, "width": 1},
            marker={"symbol": [style.MARKER_SYMBOLS[symbol_index[n] % 5] for n in line["context_length"]], "size": 6},
            name=model_style.name,
            showlegend=training["adapter"].nunique() > 1,
            customdata=line["context_length"],
            hovertemplate="step %{x}: %{y:.4f} nats/token in %{customdata:,} tokens<extra></extra>",
        )
    return shapes.finish(figure, "optimiser step", "loss (nats/token)")


def plot_validation_loss(validation: pd.DataFrame) -> go.Figure:
    """Change of the validation loss since step 0 (nats/token) against the step: mean and range over documents."""
    title = "Change of the validation loss since step 0"
    if reason := style.missing_data_reason(validation, "adapter", "step", "nll"):
        return style.empty_figure(title, reason)
    curves = {}
    for label, model_style in _training_styles(validation).items():
        rows = validation[validation["adapter"] == label]
        change = _loss_change(rows, ["step", "doc"]).unstack("doc")
        curves[model_style] = pd.DataFrame(
            {"mean": change.mean(axis=1), "low": change.min(axis=1), "high": change.max(axis=1)}
        )
    hover = "step %{x}: %{y:+.4f} nats/token since step 0"
    return shapes.bands(title, curves, hover, "optimiser step", DIFFERENCE, level=0)


def plot_validation_loss_by_position(validation: pd.DataFrame, adapter: str) -> go.Figure:
    """Change of one training's validation loss since step 0 by position, one line per saved step."""
    title = f"Change of the validation loss by position: {style.escape_label(adapter)}"
    if reason := style.missing_data_reason(validation, "adapter", "step", "nll", "position"):
        return style.empty_figure(title, reason)
    rows = validation[validation["adapter"] == adapter]
    change = _loss_change(rows, ["step", "position"]).unstack("step")
    steps = [step for step in sorted(rows["step"].unique()) if step > 0]
    styles = style.ordered_styles([f"step {step}" for step in steps]).values()
    curves = {line_style: pd.DataFrame({"y": change[step]}) for step, line_style in zip(steps, styles, strict=True)}
    hover = f"{shapes.NAME}, up to position %{{x:,}}: %{{y:+.4f}} nats/token<extra></extra>"
    return shapes.lines(title, curves, hover, shapes.position_axis(rows["position"]), DIFFERENCE, level=0)


def _training_styles(frame: pd.DataFrame) -> dict[str, style.ModelStyle]:
    return style.model_styles(frame.rename(columns={"adapter": "model"}))


def _loss_change(rows: pd.DataFrame, key_columns: list[str]) -> pd.Series:
    """Change of the mean loss per token since step 0, by `key_columns`; the first of them is `step`."""
    rows = rows.astype({"nll": np.float64, "doc": "str"})
    means = mean_losses(rows, key_columns)
    change: pd.Series = means.sub(means.xs(0, level="step"), level=key_columns[1])
    return change


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The loss of the training batches and of the validation documents."""
    yield ChartGroup("During training", "Training", _loss_charts(context), app_pages="/checkpoints")


def _loss_charts(context: RenderContext) -> Iterator[Chart]:
    run = context.run
    if "training" in run.tables:
        yield Chart(
            plot_training_loss(run.training),
            "Loss of each step's batch, before the step. It is noisy because batches differ in difficulty, and it is "
            "lower for longer sequences. The symbol of a point shows the sequence length.",
            half_width=True,
        )
    if "validation" in run.tables:
        yield Chart(
            plot_validation_loss(run.validation),
            "Validation documents are never trained on. The line is the mean over documents; the band spans the "
            "documents, from the largest to the smallest improvement. Below 0, the loss is lower than at step 0.",
            half_width=True,
        )
        for adapter in run.validation["adapter"].unique():
            yield Chart(
                plot_validation_loss_by_position(run.validation, str(adapter)),
                "The same documents by position: change of the loss since step 0, one line per saved adapter.",
                half_width=True,
            )
