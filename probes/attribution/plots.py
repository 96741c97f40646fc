"""Plots of logit attribution: terms of the next token's logit by layer, and one head's term by position."""

import pandas as pd
import plotly.graph_objects as go

from headscope.bins import bin_center
from headscope.plots import axes, shapes, style
from headscope.plots.shapes import mean_curve
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from probes.attribution.schema import mean_over_positions

PART_LABELS = {"heads": "all heads of the layer", "other": "the rest of the layer (MLP)"}


def plot_by_layer(parts: pd.DataFrame, model: str) -> go.Figure:
    """Bars of what the heads and the rest of each layer add, at the longest context."""
    title = f"Terms of the next token's logit: {style.escape_label(model)}"
    rows = parts[parts["model"] == model]
    if rows.empty:
        return style.empty_figure(title, "no data for this model")
    means = mean_over_positions(rows_at_longest_length(plain_types(rows)), "part", "layer")
    series = {
        part_style: means[means.index.get_level_values("part") == part].droplevel("part").to_frame("y")
        for part, part_style in zip(PART_LABELS, style.category_styles([*PART_LABELS.values()]).values(), strict=True)
    }
    hover = "layer %{x}: %{y:+.3f} logits"
    return shapes.bars(title, series, hover, "layer", "contribution (logits)", barmode="relative")


def plot_by_position(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """The head's contribution by position, a line with its interval over documents per model.

    `rows` are the rows of this head in the table `attribution`.
    """
    title, rows = f"Direct logit attribution of layer {layer}, head {head}", rows[rows["model"].isin(models)]
    if rows.empty:
        return style.empty_figure(title, "not measured in these models")
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(models)))
    length = int(rows["context_length"].max())
    curves = {}
    for label, model_style in style.model_styles(rows).items():
        of_model = rows[rows["model"] == label]
        table = of_model.pivot_table(index="position", columns="doc", values="contribution", observed=True)
        is_by_token = (of_model["tokens"] == 1).all()
        curves[model_style] = mean_curve(
            table.set_axis(table.index if is_by_token else bin_center(table.index, length))
        )
    x = {"title_text": "position of the predicted token", **axes.log_axis([1, length])}
    return shapes.bands(title, curves, "around position %{x:,.0f}: %{y:+.3f} logits", x, "contribution (logits)")
