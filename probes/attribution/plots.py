"""Plots of logit attribution: terms of the next token's logit by layer, and one head's term by position."""

import pandas as pd
import plotly.graph_objects as go

from headscope.bins import bin_center
from headscope.plots import axes, style
from headscope.runs.aggregation import confidence_interval, plain_types, rows_at_longest_length
from probes.attribution.schema import mean_over_positions

PART_LABELS = {"heads": "all heads of the layer", "other": "the rest of the layer (MLP)"}


def plot_by_layer(parts: pd.DataFrame, model: str) -> go.Figure:
    """Bars of what the heads and the rest of each layer add, at the longest context."""
    title = f"Terms of the next token's logit: {style.escape_label(model)}"
    rows = parts[parts["model"] == model]
    if rows.empty:
        return style.empty_figure(title, "no data for this model")
    means = mean_over_positions(rows_at_longest_length(plain_types(rows)), "part", "layer")
    figure = style.new_figure(title)
    for index, (part, name) in enumerate(PART_LABELS.items()):
        by_layer = means[means.index.get_level_values("part") == part].droplevel("part")
        hover = "layer %{x}: %{y:+.3f} logits<extra>" + name + "</extra>"
        figure.add_bar(
            x=by_layer.index, y=by_layer, name=name, marker_color=style.CATEGORY_PALETTE[index], hovertemplate=hover
        )
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(title_text="contribution (logits)")
    return style.fit_legend(figure.update_layout(barmode="relative"))


def plot_by_position(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """The head's contribution by position, a line with its interval over documents per model.

    `rows` are the rows of this head in the table `attribution`.
    """
    title, rows = f"Direct logit attribution of layer {layer}, head {head}", rows[rows["model"].isin(models)]
    if rows.empty:
        return style.empty_figure(title, "not measured in these models")
    figure = style.new_figure(title)
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(models)))
    length = int(rows["context_length"].max())
    for label, model_style in style.model_styles(rows).items():
        of_model = rows[rows["model"] == label]
        table = of_model.pivot_table(index="position", columns="doc", values="contribution", observed=True)
        values = table.to_numpy(dtype="float64")
        low, high = confidence_interval(values)
        is_by_token = (of_model["tokens"] == 1).all()
        positions = table.index if is_by_token else bin_center(table.index, length)
        line = pd.DataFrame({"mean": values.mean(1), "low": low, "high": high}, index=positions)
        style.add_line_with_band(figure, line, model_style, "around position %{x:,.0f}: %{y:+.3f} logits")
    figure.update_xaxes(title_text="position of the predicted token", **axes.log_axis([1, length]))
    figure.update_yaxes(title_text="contribution (logits)")
    return style.fit_legend(figure)
