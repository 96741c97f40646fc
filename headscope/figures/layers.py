"""A statistic by depth, and by training step: a line through the middle of the heads with a band around them."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style
from headscope.figures.steps import Steps
from headscope.runs.statistics import statistic


def by_layer(heads: pd.DataFrame, name: str) -> go.Figure:
    """Mean over the heads of each layer (geometric where the statistic is logarithmic) with the 0.1-0.9 quantile band.

    One line a model. Heads without a finite value, such as the effective base of unrotated ones, are left out.
    """
    shown = statistic(name)
    title = f"{shown.title} by layer"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    looks = style.looks(heads)
    made = style.figure(title)
    for label, look in looks.items():
        table = _bands(heads[heads["model"] == label], "layer", name, shown.log_scale)
        style.band(made, table, look, f"layer %{{x}}: {shown.label} %{{y:.4g}}{style.suffix(shown.unit)}")
    made.update_xaxes(title_text="layer", dtick=max(1, int(heads["layer"].max()) // 6))
    return _finish(made, heads[name], name)


def over_steps(
    heads: pd.DataFrame, name: str, steps: Mapping[str, int], chosen: Sequence[tuple[int, int]] = ()
) -> go.Figure:
    """The statistic against training step: its median over heads with the 0.1-0.9 quantile band, and chosen heads.

    `steps` gives the training step of each model that has one; `chosen` are (layer, head).
    """
    shown = statistic(name)
    title = f"{shown.title} during training"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    heads = heads[heads["model"].isin(list(steps))]
    heads = heads.assign(step=heads["model"].astype(str).map(dict(steps))).dropna(subset=["step"]).sort_values("step")
    if heads.empty:
        return style.nothing(title, "no model carries a training step")
    made = style.figure(title)
    axis = Steps(heads["step"])
    hover = f"step %{{customdata:,}}: {shown.label} %{{y:.4g}}{style.suffix(shown.unit)}"
    table = _bands(heads, "step", name, shown.log_scale).assign(mean=heads.groupby("step")[name].median())
    placed = table.set_index(axis.places(table.index.to_series()))
    style.band(made, placed, style.Look("median of all heads", "#8C8C8C", "solid", "circle"), hover)
    made.data[-1].customdata = list(table.index)
    for at, (layer, head) in enumerate(chosen):
        line = heads[(heads["layer"] == layer) & (heads["head"] == head)]
        made.add_scatter(
            x=axis.places(line["step"]),
            y=line[name],
            customdata=line["step"],
            mode="lines+markers",
            line={"color": style.PALETTE[at % 7], "dash": style.DASHES[at // 7 % 4]},
            name=f"layer {layer}, head {head}",
            hovertemplate=f"{hover}<extra>layer {layer}, head {head}</extra>",
        )
    made.update_xaxes(title_text="training step", **axis.axis)
    return _finish(made, heads[name], name)


def by_step(heads: pd.DataFrame, name: str, steps: Mapping[str, int]) -> go.Figure:
    """Median of the statistic over the heads of a layer, layer by training step; colour is logarithmic where it says.

    `steps` gives the training step of each model that has one.
    """
    shown = statistic(name)
    title = f"{shown.title} by layer during training"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    known = heads[heads["model"].isin(list(steps))]
    known = known.assign(step=known["model"].astype(str).map(dict(steps)))
    if known.empty:
        return style.nothing(title, "no model carries a training step")
    grid = known.groupby(["layer", "step"])[name].median().unstack("step")
    numbers = grid.to_numpy(dtype=np.float64)
    made = style.figure(title, int(np.clip(150 + 14 * len(grid), 280, 640)))
    bar = {"title": {"text": shown.unit}} | (axes.log_bar(numbers) if shown.log_scale else {})
    made.add_heatmap(
        x=[f"{step:,}" for step in grid.columns],
        y=list(grid.index),
        z=np.log10(numbers) if shown.log_scale else numbers,
        customdata=numbers,
        hovertemplate=f"layer %{{y}}, step %{{x}}: {shown.label} %{{customdata:.4g}}{style.suffix(shown.unit)}"
        "<extra></extra>",
        colorscale=style.SEQUENTIAL,
        colorbar=bar,
        xgap=1,
        ygap=1,
    )
    made.update_xaxes(title_text="training step", type="category", showgrid=False)
    made.update_yaxes(title_text="layer", showgrid=False)
    return style.top(made)


def _bands(heads: pd.DataFrame, by: str, name: str, log_scale: bool) -> pd.DataFrame:
    """mean, low, high of the finite values of the column, by `by`."""
    values = heads[name].astype("float64")
    kept = np.isfinite(values) & ((values > 0) | (not log_scale))
    finite = pd.DataFrame({by: heads[by], "value": np.log(values[kept]) if log_scale else values[kept]}).dropna()
    groups = finite.groupby(by)["value"]
    table = pd.DataFrame({"mean": groups.mean(), "low": groups.quantile(0.1), "high": groups.quantile(0.9)})
    return table.apply(np.exp) if log_scale else table


def _finish(made: go.Figure, values: pd.Series, name: str) -> go.Figure:
    shown = statistic(name)
    made.update_yaxes(title_text=shown.worded)
    if shown.log_scale:
        made.update_yaxes(axes.log_axis(values))
    return style.room_for_legend(made)
