"""Plots of circuits of heads: minimality of the members, and the circuit against the model with subsets removed."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.sweep import Effects
from headscope.effects.units import unit_name
from headscope.plots import head_scatter, shapes, style
from probes.circuit.schema import WHOLE

FAMILIES = {WHOLE: "nothing removed", "random": "random subset removed", "greedy": "greedy subset removed"}


def plot_members(effects: Effects, label: str) -> go.Figure:
    """Bars of the minimality of every member with its interval; `label` names the metric with its unit."""
    units = effects.units.sort_values("effect", ascending=False, kind="stable").rename(columns={"effect": "y"})
    model = style.escape_label(effects.model)
    table = units[["y", "low", "high"]].set_axis([unit_name(unit) for _, unit in units.iterrows()])
    table["customdata"] = units[["layer", "head", "kv_group"]].to_numpy().tolist()
    figure = shapes.bars(
        f"Minimality of the members: {model}, {style.escape_label(effects.key['prompts'])}",
        {style.ModelStyle(model, style.PALETTE[0], "", ""): table},
        "with minus without %{x}: %{y:.3g}<extra></extra>",
        {},
        f"{label}, with minus without",
        top_margin=70,
    )
    return style.set_metadata(figure, heads=True, model=model)


def plot_completeness(rows: pd.DataFrame, place: str, label: str) -> go.Figure:
    """Mean metric of the model against that of the circuit, one point per removed subset; the dashed line is y = x.

    `rows` are those of the table `circuit` of one circuit, `place` names it.
    """
    means = rows.groupby("subset", sort=False, observed=True).agg(
        x=("metric_model", "mean"), y=("metric_circuit", "mean"), heads=("heads", "first")
    )
    figure = style.new_figure(f"Completeness: {place}")
    for number, (family, name) in enumerate(FAMILIES.items()):
        points = means[means.index.str.startswith(family)]
        if len(points):
            figure.add_scatter(
                x=points["x"],
                y=points["y"],
                mode="markers",
                marker={"symbol": style.MARKER_SYMBOLS[number], "size": 9, "color": style.CATEGORY_PALETTE[number]},
                text=[heads or "nothing" for heads in points["heads"]],
                hovertemplate="%{text} removed<br>model %{x:.3g}<br>circuit %{y:.3g}<extra></extra>",
                name=name,
            )
    values = means[["x", "y"]].to_numpy(dtype=np.float64)
    head_scatter.add_diagonal(figure, [values.min(), values.max()])
    shapes.finish(figure, f"model: {label}", f"circuit: {label}")
    return style.set_metadata(figure, value=f"{label} of the circuit", x=f"{label} of the model")
