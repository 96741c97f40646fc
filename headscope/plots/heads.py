"""All heads of a model at once: as a layer x head matrix, and as the spread of a statistic over heads.

`heads` is always the wide table of `headscope.runs.summary.heads`.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.column_metadata import statistic
from headscope.runs.summary import compared

MAX_LABEL_CHARACTERS = 48
"""Letters of all labels that stand beside each other under a chart of half the page."""


def plot_matrix(heads: pd.DataFrame, statistic_name: str, model: str) -> go.Figure:
    """The statistic `name` of every head of `model`, layer by head; colour is logarithmic where the statistic says.

    One scale for all models in `heads`. Where the statistic has a sign, white is zero and the scale is symmetric.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title}: {style.escape_label(model)}"
    if why := style.missing_data_reason(heads, "model", statistic_name) or style.missing_data_reason(
        heads[heads["model"] == model], statistic_name
    ):
        return style.empty_figure(title, why)
    grid = _layer_head_grid(heads[heads["model"] == model], statistic_name)
    every = heads[statistic_name].to_numpy(dtype=np.float64)
    bar = {"title": {"text": shown.unit}} | (axes.log_colorbar(every) if shown.log_scale else {})
    made = _new_heatmap(
        title, heads, model, grid, f"{shown.label} %{{customdata[3]:.4g}}{style.unit_suffix(shown.unit)}"
    )
    made.update_traces(z=_log10(grid) if shown.log_scale else grid, colorbar=bar)
    if shown.signed:
        reach = _scale_limit(every)
        made.update_traces(zmin=-reach, zmax=reach, colorscale=style.DIVERGING_SCALE)
    else:
        colours = _log10(every) if shown.log_scale else every
        ends = colours[np.isfinite(colours)]
        low, high = (ends.min(), ends.max()) if len(ends) else (0, 1)
        made.update_traces(zmin=low, zmax=high if high > low else low + 1, colorscale=style.SEQUENTIAL_SCALE)
    return style.set_metadata(made, value=shown.worded, model=style.escape_label(model), value_index=3)


def plot_small_matrices(heads: pd.DataFrame, statistic_name: str) -> go.Figure:
    """`matrix` of every model side by side, small, on one scale."""
    shown = statistic(statistic_name)
    title = f"{shown.title} of every head"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    known = heads[heads["model"].isin(heads.dropna(subset=[statistic_name])["model"])]
    looks = style.model_styles(known)
    made = style.panel_figure(title, [look.name for look in looks.values()], columns=4, height=250)
    for at, (label, look) in enumerate(looks.items()):
        mine = plot_matrix(known, statistic_name, label)
        drawn = mine.data[0].update(
            coloraxis="coloraxis", colorscale=None, colorbar=None, xgap=0, ygap=0, name=look.name
        )
        scale = {"cmin": drawn.zmin, "cmax": drawn.zmax, "colorscale": colour_scale(statistic_name)}
        made.add_trace(drawn.update(zmin=None, zmax=None), **style.panel_row_col(at, [*looks], 4))
        if at == 0:
            every = known[statistic_name].to_numpy(dtype=np.float64)
            bar = {"title": {"text": shown.unit}} | (axes.log_colorbar(every) if shown.log_scale else {})
            made.update_layout(coloraxis={**scale, "colorbar": bar})
    made.update_xaxes(showgrid=False, showline=False, ticks="", showticklabels=False)
    made.update_yaxes(showgrid=False, showline=False, ticks="")
    style.set_outer_axis_titles(made, len(looks), "head", "layer", 4)
    made.update_xaxes(showticklabels=False)
    return style.set_metadata(
        style.set_top_margin(style.declare_head_points(made), 74), value=shown.worded, value_index=3
    )


def colour_scale(statistic_name: str) -> object:
    """The colours of a statistic: from blue to red where zero is its middle."""
    return style.DIVERGING_SCALE if statistic(statistic_name).signed else style.SEQUENTIAL_SCALE


def plot_change(heads: pd.DataFrame, statistic_name: str, model: str, baseline: str) -> go.Figure:
    """The statistic `name` of `model` against `baseline`, as ratio if logarithmic, else difference.

    White is no change. One symmetric scale for all models in `heads`, to the 99 % quantile of the absolute change.
    """
    shown = statistic(statistic_name)
    title = f"Change of {shown.label}: {style.escape_label(model)} against {style.escape_label(baseline)}"
    for label in (model, baseline):
        if why := style.missing_data_reason(heads, "model", statistic_name) or style.missing_data_reason(
            heads[heads["model"] == label], statistic_name
        ):
            return style.empty_figure(title, why)
    shapes = [_layer_head_grid(heads[heads["model"] == label], statistic_name).shape for label in (model, baseline)]
    if shapes[0] != shapes[1]:
        return style.empty_figure(title, "the two models have different heads")
    others = [label for label in heads["model"].unique() if label != baseline]
    changes = {label: compared(heads, statistic_name, label, baseline) for label in others}
    every = pd.concat(changes.values())["change"].to_numpy(dtype=np.float64)
    mine = changes[model][["layer", "head", "change"]]
    grid = _layer_head_grid(heads[heads["model"] == model].merge(mine, on=["layer", "head"], how="left"), "change")
    reach = _scale_limit(_log10(every) if shown.log_scale else every)
    if shown.log_scale:
        bar = {"title": {"text": "ratio"}} | axes.log_colorbar([10**-reach, 10**reach])
        hover = f"{shown.label} × %{{customdata[3]:.3f}}"
    else:
        bar, hover = (
            {"title": {"text": shown.unit}},
            f"{shown.label} %{{customdata[3]:+.3g}}{style.unit_suffix(shown.unit)}",
        )
    made = _new_heatmap(title, heads, model, grid, hover)
    colour = _log10(grid) if shown.log_scale else grid
    made.update_traces(z=colour, zmin=-reach, zmax=reach, colorscale=style.DIVERGING_SCALE, colorbar=bar)
    how = "ratio" if shown.log_scale else f"difference of {shown.worded}"
    return style.set_metadata(
        made, value=f"{how} to {style.escape_label(baseline)}", model=style.escape_label(model), shown=3
    )


def _scale_limit(values: npt.NDArray[np.float64]) -> float:
    """The end of a symmetric scale: the 99 % quantile of the absolute values."""
    sizes = np.abs(values[np.isfinite(values)])
    found = float(np.quantile(sizes, 0.99)) if len(sizes) else 0.0
    return found or 0.01


def plot_distribution(heads: pd.DataFrame, statistic_name: str = "cov") -> go.Figure:
    """The statistic over heads, a box per model: minimum, quartiles, median, maximum, mean; a dot is a head.

    The dots of a model run from its first layer on the left to its last on the right.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} over all heads"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    heads = heads[np.isfinite(heads[statistic_name])]
    looks = style.model_styles(heads)
    made = style.new_figure(title, 420)
    for at, (label, look) in enumerate(looks.items()):
        mine = heads[heads["model"] == label]
        values = mine[statistic_name].to_numpy(dtype=np.float64)
        low, lower, median, upper, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
        depth = mine["layer"] / max(int(heads["layer"].max()), 1)
        made.add_scatter(
            x=at + 0.06 + 0.34 * depth,
            y=values,
            mode="markers",
            marker={"color": look.colour, "size": 5, "opacity": 0.55},
            customdata=mine[["layer", "head", "kv_group"]].to_numpy(),
            name=look.name,
            hovertemplate="layer %{customdata[0]}, head %{customdata[1]}, key group %{customdata[2]}<br>"
            f"{shown.label} %{{y:.4g}}{style.unit_suffix(shown.unit)}<extra>{look.name}</extra>",
        )
        made.add_box(
            x=[at - 0.2],
            lowerfence=[low],
            q1=[lower],
            median=[median],
            q3=[upper],
            upperfence=[high],
            mean=[values.mean()],
            width=0.3,
            name=look.name,
            line_color=look.colour,
            fillcolor=look.fill_colour,
            hoverinfo="y",
        )
    style.set_top_margin(made.update_layout(showlegend=False))
    called = [style.escape_label(label, 16) for label in looks]
    slanted = -35 if sum(map(len, called)) > MAX_LABEL_CHARACTERS else 0
    made.update_xaxes(tickvals=list(range(len(looks))), ticktext=called, tickangle=slanted)
    made.update_xaxes(range=[-0.55, len(looks) - 0.4])
    made.update_yaxes(title_text=shown.worded)
    if shown.log_scale:
        made.update_yaxes(axes.log_axis(heads[statistic_name]))
    return style.set_metadata(style.declare_head_points(made), x="place")


def _new_heatmap(title: str, heads: pd.DataFrame, model: str, grid: npt.NDArray[np.float64], hover: str) -> go.Figure:
    layers, across = grid.shape
    layer, head = np.indices(grid.shape)
    made = style.new_figure(title, int(np.clip(130 + 18 * layers, 280, 760)))
    made.add_heatmap(
        x=list(range(across)),
        y=list(range(layers)),
        customdata=np.dstack([layer, head, _layer_head_grid(heads[heads["model"] == model], "kv_group"), grid]),
        hovertemplate=f"layer %{{y}}, head %{{x}}, key group %{{customdata[2]}}<br>{hover}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    made.update_xaxes(title_text="head", dtick=max(1, across // 16), showgrid=False, showline=False)
    made.update_yaxes(title_text="layer", dtick=max(1, layers // 16), showgrid=False, showline=False)
    return style.declare_head_points(style.set_top_margin(made))


def _layer_head_grid(heads: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """The column as an array [layers, heads]; NaN where a head is absent."""
    grid = np.full((int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1), np.nan)
    grid[heads["layer"], heads["head"]] = heads[column]
    return grid


def _log10(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log10, NaN (a gap) where it is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: npt.NDArray[np.float64] = np.log10(values)
    return np.where(np.isfinite(logs), logs, np.nan)
