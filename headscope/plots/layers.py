"""A statistic by layer and by training step: the mean or median over heads with a quantile band."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, shapes, style
from headscope.plots.axes import CountAxis
from headscope.runs.column_metadata import statistic


def plot_by_layer(heads: pd.DataFrame, statistic_name: str) -> go.Figure:
    """Plot the mean over the heads of each layer with the 0.1 to 0.9 quantile band, one line per model.

    The mean is geometric if the statistic has a log scale. Heads without a finite value are left out, such as the
    effective base of heads without rotation.
    """
    stat = statistic(statistic_name)
    title = f"{stat.title} by layer"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    curves = {
        model_style: _quantile_bands(heads[heads["model"] == label], "layer", statistic_name, stat.log_scale)
        for label, model_style in style.model_styles(heads).items()
    }
    hover = f"layer %{{x}}: {stat.label} %{{y:.4g}}{style.unit_suffix(stat.unit)}"
    layer_axis = {"title_text": "layer", "dtick": max(1, int(heads["layer"].max()) // 6)}
    return shapes.bands(title, curves, hover, layer_axis, _statistic_axis(heads, statistic_name))


def plot_over_steps(
    heads: pd.DataFrame,
    statistic_name: str,
    training_steps: Mapping[str, int],
    selected_heads: Sequence[tuple[int, int]] = (),
) -> go.Figure:
    """Plot the median over heads by training step with the 0.1 to 0.9 quantile band, and selected heads.

    `training_steps` maps model labels to steps; `selected_heads` are (layer, head).
    """
    stat = statistic(statistic_name)
    title = f"{stat.title} during training"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    heads = heads[heads["model"].isin(list(training_steps))]
    heads = (
        heads.assign(step=heads["model"].astype(str).map(dict(training_steps)))
        .dropna(subset=["step"])
        .sort_values("step")
    )
    if heads.empty:
        return style.empty_figure(title, "no model has a training step")
    figure = style.new_figure(title)
    axis = CountAxis(heads["step"])
    hover = f"step %{{customdata:,}}: {stat.label} %{{y:.4g}}{style.unit_suffix(stat.unit)}"
    table = _quantile_bands(heads, "step", statistic_name, stat.log_scale).assign(
        mean=heads.groupby("step")[statistic_name].median()
    )
    curve = table.set_index(axis.positions(table.index.to_series()))
    style.add_line_with_band(
        figure, curve, style.ModelStyle("median over all heads", "#8C8C8C", "solid", "circle"), hover
    )
    figure.data[-1].customdata = list(table.index)
    for index, (layer, head) in enumerate(selected_heads):
        head_rows = heads[(heads["layer"] == layer) & (heads["head"] == head)]
        figure.add_scatter(
            x=axis.positions(head_rows["step"]),
            y=head_rows[statistic_name],
            customdata=head_rows["step"],
            mode="lines+markers",
            line={"color": style.CATEGORY_PALETTE[index % 7], "dash": style.LINE_DASHES[index // 7 % 4]},
            name=f"layer {layer}, head {head}",
            hovertemplate=f"{hover}<extra>layer {layer}, head {head}</extra>",
        )
    step_axis = {"title_text": "training step", **axis.settings}
    return shapes.finish(figure, step_axis, _statistic_axis(heads, statistic_name))


def plot_layers_by_step(heads: pd.DataFrame, statistic_name: str, training_steps: Mapping[str, int]) -> go.Figure:
    """Plot the median over the heads of each layer by training step as a heatmap.

    Colours are logarithmic if the statistic has a log scale. `training_steps` maps model labels to steps.
    """
    stat = statistic(statistic_name)
    title = f"{stat.title} by layer during training"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    rows = heads[heads["model"].isin(list(training_steps))]
    rows = rows.assign(step=rows["model"].astype(str).map(dict(training_steps)))
    if rows.empty:
        return style.empty_figure(title, "no model has a training step")
    grid = rows.groupby(["layer", "step"])[statistic_name].median().unstack("step").astype("float64")
    numbers = grid.to_numpy()
    colours: dict[str, Any] = (
        {"colorbar": {"title": {"text": stat.unit}} | axes.log_colorbar(numbers)} if stat.log_scale else {}
    )
    return shapes.matrix(
        title,
        (grid.map(np.log10) if stat.log_scale else grid).rename(columns="{:,}".format),
        f"layer %{{y}}, step %{{x}}: {stat.label} %{{customdata:.4g}}{style.unit_suffix(stat.unit)}",
        {"title_text": "training step", "type": "category", "showgrid": False},
        {"title_text": "layer", "showgrid": False},
        unit=stat.unit,
        height=int(np.clip(150 + 14 * len(grid), 280, 640)),
        customdata=numbers,
        **colours,
    )


def _quantile_bands(heads: pd.DataFrame, group_column: str, statistic_name: str, log_scale: bool) -> pd.DataFrame:
    """Columns mean, low and high (0.1 and 0.9 quantiles) of the finite values, by `group_column`."""
    values = heads[statistic_name].astype("float64")
    is_finite = np.isfinite(values) & ((values > 0) | (not log_scale))
    finite = pd.DataFrame(
        {group_column: heads[group_column], "value": np.log(values[is_finite]) if log_scale else values[is_finite]}
    ).dropna()
    groups = finite.groupby(group_column)["value"]
    table = pd.DataFrame({"mean": groups.mean(), "low": groups.quantile(0.1), "high": groups.quantile(0.9)})
    return table.apply(np.exp) if log_scale else table


def _statistic_axis(heads: pd.DataFrame, statistic_name: str) -> shapes.Axis:
    stat = statistic(statistic_name)
    return {"title_text": stat.label_with_unit, **(axes.log_axis(heads[statistic_name]) if stat.log_scale else {})}
