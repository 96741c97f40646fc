"""All heads of a model at once: as a layer x head matrix, and as the spread of a statistic over heads.

`heads` is always the wide table of `headscope.runs.summary.heads`.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style
from headscope.runs.statistics import statistic
from headscope.runs.summary import compared

ACROSS = 48
"""Letters of all labels that stand beside each other under a chart of half the page."""


def matrix(heads: pd.DataFrame, name: str, model: str) -> go.Figure:
    """The statistic `name` of every head of `model`, layer by head; colour is logarithmic where the statistic says.

    One scale for all models in `heads`. Where the statistic has a sign, white is zero and the scale is symmetric.
    """
    shown = statistic(name)
    title = f"{shown.title}: {style.text(model)}"
    if why := style.lacks(heads, "model", name) or style.lacks(heads[heads["model"] == model], name):
        return style.nothing(title, why)
    grid = _grid(heads[heads["model"] == model], name)
    every = heads[name].to_numpy(dtype=np.float64)
    bar = {"title": {"text": shown.unit}} | (axes.log_bar(every) if shown.log_scale else {})
    made = _heatmap(title, heads, model, grid, f"{shown.label} %{{customdata[3]:.4g}}{style.suffix(shown.unit)}")
    made.update_traces(z=_log10(grid) if shown.log_scale else grid, colorbar=bar)
    if shown.signed:
        reach = _reach(every)
        made.update_traces(zmin=-reach, zmax=reach, colorscale=style.DIVERGING)
    else:
        colours = _log10(every) if shown.log_scale else every
        ends = colours[np.isfinite(colours)]
        low, high = (ends.min(), ends.max()) if len(ends) else (0, 1)
        made.update_traces(zmin=low, zmax=high if high > low else low + 1, colorscale=style.SEQUENTIAL)
    return style.says(made, value=shown.worded, model=style.text(model), shown=3)


def small(heads: pd.DataFrame, name: str) -> go.Figure:
    """`matrix` of every model side by side, small, on one scale."""
    shown = statistic(name)
    title = f"{shown.title} of every head"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    known = heads[heads["model"].isin(heads.dropna(subset=[name])["model"])]
    looks = style.looks(known)
    made = style.panels(title, [look.name for look in looks.values()], columns=4, height=250)
    for at, (label, look) in enumerate(looks.items()):
        mine = matrix(known, name, label)
        drawn = mine.data[0].update(
            coloraxis="coloraxis", colorscale=None, colorbar=None, xgap=0, ygap=0, name=look.name
        )
        scale = {"cmin": drawn.zmin, "cmax": drawn.zmax, "colorscale": matrix_scale(name)}
        made.add_trace(drawn.update(zmin=None, zmax=None), **style.place(at, [*looks], 4))
        if at == 0:
            every = known[name].to_numpy(dtype=np.float64)
            bar = {"title": {"text": shown.unit}} | (axes.log_bar(every) if shown.log_scale else {})
            made.update_layout(coloraxis={**scale, "colorbar": bar})
    made.update_xaxes(showgrid=False, showline=False, ticks="", showticklabels=False)
    made.update_yaxes(showgrid=False, showline=False, ticks="")
    style.outer_titles(made, len(looks), "head", "layer", 4)
    made.update_xaxes(showticklabels=False)
    return style.says(style.top(style.of_heads(made), 74), value=shown.worded, shown=3)


def matrix_scale(name: str) -> object:
    """The colours of a statistic: from blue to red where zero is its middle."""
    return style.DIVERGING if statistic(name).signed else style.SEQUENTIAL


def change(heads: pd.DataFrame, name: str, model: str, baseline: str) -> go.Figure:
    """The statistic `name` of `model` against `baseline`, as ratio if logarithmic, else difference.

    White is no change. One symmetric scale for all models in `heads`, to the 99 % quantile of the absolute change.
    """
    shown = statistic(name)
    title = f"Change of {shown.label}: {style.text(model)} against {style.text(baseline)}"
    for label in (model, baseline):
        if why := style.lacks(heads, "model", name) or style.lacks(heads[heads["model"] == label], name):
            return style.nothing(title, why)
    shapes = [_grid(heads[heads["model"] == label], name).shape for label in (model, baseline)]
    if shapes[0] != shapes[1]:
        return style.nothing(title, "the two models have different heads")
    others = [label for label in heads["model"].unique() if label != baseline]
    changes = {label: compared(heads, name, label, baseline) for label in others}
    every = pd.concat(changes.values())["change"].to_numpy(dtype=np.float64)
    mine = changes[model][["layer", "head", "change"]]
    grid = _grid(heads[heads["model"] == model].merge(mine, on=["layer", "head"], how="left"), "change")
    reach = _reach(_log10(every) if shown.log_scale else every)
    if shown.log_scale:
        bar = {"title": {"text": "ratio"}} | axes.log_bar([10**-reach, 10**reach])
        hover = f"{shown.label} × %{{customdata[3]:.3f}}"
    else:
        bar, hover = {"title": {"text": shown.unit}}, f"{shown.label} %{{customdata[3]:+.3g}}{style.suffix(shown.unit)}"
    made = _heatmap(title, heads, model, grid, hover)
    colour = _log10(grid) if shown.log_scale else grid
    made.update_traces(z=colour, zmin=-reach, zmax=reach, colorscale=style.DIVERGING, colorbar=bar)
    how = "ratio" if shown.log_scale else f"difference of {shown.worded}"
    return style.says(made, value=f"{how} to {style.text(baseline)}", model=style.text(model), shown=3)


def _reach(values: npt.NDArray[np.float64]) -> float:
    """The end of a symmetric scale: the 99 % quantile of the absolute values."""
    sizes = np.abs(values[np.isfinite(values)])
    found = float(np.quantile(sizes, 0.99)) if len(sizes) else 0.0
    return found or 0.01


def spread(heads: pd.DataFrame, name: str = "cov") -> go.Figure:
    """The statistic over heads, a box per model: minimum, quartiles, median, maximum, mean; a dot is a head.

    The dots of a model run from its first layer on the left to its last on the right.
    """
    shown = statistic(name)
    title = f"{shown.title} over all heads"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    heads = heads[np.isfinite(heads[name])]
    looks = style.looks(heads)
    made = style.figure(title, 420)
    for at, (label, look) in enumerate(looks.items()):
        mine = heads[heads["model"] == label]
        values = mine[name].to_numpy(dtype=np.float64)
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
            f"{shown.label} %{{y:.4g}}{style.suffix(shown.unit)}<extra>{look.name}</extra>",
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
            fillcolor=look.shade,
            hoverinfo="y",
        )
    style.top(made.update_layout(showlegend=False))
    called = [style.text(label, 16) for label in looks]
    slanted = -35 if sum(map(len, called)) > ACROSS else 0
    made.update_xaxes(tickvals=list(range(len(looks))), ticktext=called, tickangle=slanted)
    made.update_xaxes(range=[-0.55, len(looks) - 0.4])
    made.update_yaxes(title_text=shown.worded)
    if shown.log_scale:
        made.update_yaxes(axes.log_axis(heads[name]))
    return style.says(style.of_heads(made), x="place")


def _heatmap(title: str, heads: pd.DataFrame, model: str, grid: npt.NDArray[np.float64], hover: str) -> go.Figure:
    layers, across = grid.shape
    layer, head = np.indices(grid.shape)
    made = style.figure(title, int(np.clip(130 + 18 * layers, 280, 760)))
    made.add_heatmap(
        x=list(range(across)),
        y=list(range(layers)),
        customdata=np.dstack([layer, head, _grid(heads[heads["model"] == model], "kv_group"), grid]),
        hovertemplate=f"layer %{{y}}, head %{{x}}, key group %{{customdata[2]}}<br>{hover}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    made.update_xaxes(title_text="head", dtick=max(1, across // 16), showgrid=False, showline=False)
    made.update_yaxes(title_text="layer", dtick=max(1, layers // 16), showgrid=False, showline=False)
    return style.of_heads(style.top(made))


def _grid(heads: pd.DataFrame, name: str) -> npt.NDArray[np.float64]:
    """The column as an array [layers, heads]; NaN where a head is absent."""
    grid = np.full((int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1), np.nan)
    grid[heads["layer"], heads["head"]] = heads[name]
    return grid


def _log10(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log10, NaN (a gap) where it is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: npt.NDArray[np.float64] = np.log10(values)
    return np.where(np.isfinite(logs), logs, np.nan)
