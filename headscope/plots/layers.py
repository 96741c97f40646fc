"""A statistic by depth, and by training step: a line through the middle of the heads with a band around them."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.plots.axes import StepAxis
from headscope.runs.column_metadata import statistic


def plot_by_layer(heads: pd.DataFrame, statistic_name: str) -> go.Figure:
    """Mean over the heads of each layer (geometric where the statistic is logarithmic) with the 0.1-0.9 quantile band.

    One line a model. Heads without a finite value, such as the effective base of unrotated ones, are left out.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} by layer"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    looks = style.model_styles(heads)
    made = style.new_figure(title)
    for label, look in looks.items():
        table = _quantile_bands(heads[heads["model"] == label], "layer", statistic_name, shown.log_scale)
        style.add_line_with_band(
            made, table, look, f"layer %{{x}}: {shown.label} %{{y:.4g}}{style.unit_suffix(shown.unit)}"
        )
    made.update_xaxes(title_text="layer", dtick=max(1, int(heads["layer"].max()) // 6))
    return _label_y_axis(made, heads[statistic_name], statistic_name)


def plot_over_steps(
    heads: pd.DataFrame,
    statistic_name: str,
    training_steps: Mapping[str, int],
    selected_heads: Sequence[tuple[int, int]] = (),
) -> go.Figure:
    """The statistic against training step: its median over heads with the 0.1-0.9 quantile band, and chosen heads.

    `steps` gives the training step of each model that has one; `chosen` are (layer, head).
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} during training"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    heads = heads[heads["model"].isin(list(training_steps))]
    heads = (
        heads.assign(step=heads["model"].astype(str).map(dict(training_steps)))
        .dropna(subset=["step"])
        .sort_values("step")
    )
    if heads.empty:
        return style.empty_figure(title, "no model carries a training step")
    made = style.new_figure(title)
    axis = StepAxis(heads["step"])
    hover = f"step %{{customdata:,}}: {shown.label} %{{y:.4g}}{style.unit_suffix(shown.unit)}"
    table = _quantile_bands(heads, "step", statistic_name, shown.log_scale).assign(
        mean=heads.groupby("step")[statistic_name].median()
    )
    placed = table.set_index(axis.positions(table.index.to_series()))
    style.add_line_with_band(made, placed, style.ModelStyle("median of all heads", "#8C8C8C", "solid", "circle"), hover)
    made.data[-1].customdata = list(table.index)
    for at, (layer, head) in enumerate(selected_heads):
        line = heads[(heads["layer"] == layer) & (heads["head"] == head)]
        made.add_scatter(
            x=axis.positions(line["step"]),
            y=line[statistic_name],
            customdata=line["step"],
            mode="lines+markers",
            line={"color": style.PALETTE[at % 7], "dash": style.LINE_DASHES[at // 7 % 4]},
            name=f"layer {layer}, head {head}",
            hovertemplate=f"{hover}<extra>layer {layer}, head {head}</extra>",
        )
    made.update_xaxes(title_text="training step", **axis.settings)
    return _label_y_axis(made, heads[statistic_name], statistic_name)


def plot_layers_by_step(heads: pd.DataFrame, statistic_name: str, training_steps: Mapping[str, int]) -> go.Figure:
    """Median of the statistic over the heads of a layer, layer by training step; colour is logarithmic where it says.

    `steps` gives the training step of each model that has one.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} by layer during training"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    known = heads[heads["model"].isin(list(training_steps))]
    known = known.assign(step=known["model"].astype(str).map(dict(training_steps)))
    if known.empty:
        return style.empty_figure(title, "no model carries a training step")
    grid = known.groupby(["layer", "step"])[statistic_name].median().unstack("step")
    numbers = grid.to_numpy(dtype=np.float64)
    made = style.new_figure(title, int(np.clip(150 + 14 * len(grid), 280, 640)))
    bar = {"title": {"text": shown.unit}} | (axes.log_colorbar(numbers) if shown.log_scale else {})
    made.add_heatmap(
        x=[f"{step:,}" for step in grid.columns],
        y=list(grid.index),
        z=np.log10(numbers) if shown.log_scale else numbers,
        customdata=numbers,
        hovertemplate=f"layer %{{y}}, step %{{x}}: {shown.label} %{{customdata:.4g}}{style.unit_suffix(shown.unit)}"
        "<extra></extra>",
        colorscale=style.SEQUENTIAL_SCALE,
        colorbar=bar,
        xgap=1,
        ygap=1,
    )
    made.update_xaxes(title_text="training step", type="category", showgrid=False)
    made.update_yaxes(title_text="layer", showgrid=False)
    return style.set_top_margin(made)


def _quantile_bands(heads: pd.DataFrame, group_column: str, statistic_name: str, log_scale: bool) -> pd.DataFrame:
    """mean, low, high of the finite values of the column, by `by`."""
    values = heads[statistic_name].astype("float64")
    kept = np.isfinite(values) & ((values > 0) | (not log_scale))
    finite = pd.DataFrame(
        {group_column: heads[group_column], "value": np.log(values[kept]) if log_scale else values[kept]}
    ).dropna()
    groups = finite.groupby(group_column)["value"]
    table = pd.DataFrame({"mean": groups.mean(), "low": groups.quantile(0.1), "high": groups.quantile(0.9)})
    return table.apply(np.exp) if log_scale else table


def _label_y_axis(figure: go.Figure, values: pd.Series, statistic_name: str) -> go.Figure:
    shown = statistic(statistic_name)
    figure.update_yaxes(title_text=shown.worded)
    if shown.log_scale:
        figure.update_yaxes(axes.log_axis(values))
    return style.fit_legend(figure)
