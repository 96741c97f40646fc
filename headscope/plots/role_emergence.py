"""How heads come into being: a statistic and roles against training step, of one training or of several."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.plots.axes import StepAxis
from headscope.plots.highlight import HeadIndex
from headscope.runs.column_metadata import statistic
from headscope.runs.roles import holding

MAX_LAYER_PANELS = 12
"""Panels of layers that are drawn."""


def plot_training_by_layer(
    heads: pd.DataFrame, statistic_name: str, training_steps: pd.DataFrame, selected_heads: Collection[HeadIndex] = ()
) -> go.Figure:
    """The statistic against training step, a panel a layer.

    Of one training a line a head; of several a line a training, the median over the layer's heads, and beside it the
    heads that are picked. Of more than twelve layers evenly spread ones are drawn.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} during training, by layer"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    known = _with_training_steps(heads, training_steps).dropna(subset=[statistic_name])
    if known.empty:
        return style.empty_figure(title, "no model carries a training step")
    every = sorted(known["layer"].unique())
    layers = [
        every[at]
        for at in np.unique(np.linspace(0, len(every) - 1, min(len(every), MAX_LAYER_PANELS)).round().astype(int))
    ]
    trainings = list(dict.fromkeys(training_steps["training"]))
    made = style.panel_figure(title, [f"layer {layer}" for layer in layers], height=300)
    steps = StepAxis(known["step"])
    for at, layer in enumerate(layers):
        mine, place = known[known["layer"] == layer], style.panel_row_col(at, layers)
        if len(trainings) == 1:
            for head, line in mine.groupby("head"):
                look = _head_line_style(int(head), not selected_heads or (layer, head) in selected_heads)
                _add_line(made, line, statistic_name, f"head {head}", look, steps, at == 0, place)
            continue
        for training, look in _training_line_styles(trainings).items():
            ours = mine[mine["training"] == training]
            middle = ours.groupby("step", as_index=False)[statistic_name].median()
            _add_line(made, middle, statistic_name, style.escape_label(training), look, steps, at == 0, place)
            for head in sorted(head for where, head in selected_heads if where == layer):
                line = ours[ours["head"] == head]
                thin = {**look, "width": 1, "dash": "dot"}
                _add_line(
                    made,
                    line,
                    statistic_name,
                    f"{style.escape_label(training)}, head {head}",
                    thin,
                    steps,
                    False,
                    place,
                )
    made.update_xaxes(steps.settings)
    if shown.log_scale:
        made.update_yaxes(axes.log_axis(known[statistic_name], sparse=True))
    style.set_outer_axis_titles(made, len(layers), "training step", shown.worded)
    return made.update_layout(showlegend=True)


def plot_role_counts(heads: pd.DataFrame, training_steps: pd.DataFrame, roles: Sequence[str]) -> go.Figure:
    """How many heads bear each role against training step: a panel a role, a line a training."""
    title = "Heads that bear a role, during training"
    known = _with_training_steps(heads, training_steps)
    counts = {
        role: known.assign(bears=holding(known, role)).groupby(["training", "step"])["bears"].sum() for role in roles
    }
    counts = {role: count for role, count in counts.items() if count.any()}
    if not counts:
        return style.empty_figure(title, "no head bears a role at any step")
    trainings = list(dict.fromkeys(training_steps["training"]))
    steps = StepAxis(known["step"])
    made = style.panel_figure(title, list(counts), height=260)
    for at, (role, count) in enumerate(counts.items()):
        for training, look in _training_line_styles(trainings).items():
            if training in count.index.get_level_values("training"):
                line = count.loc[training].rename(role).reset_index()
                _add_line(
                    made,
                    line,
                    role,
                    style.escape_label(training),
                    look,
                    steps,
                    at == 0,
                    style.panel_row_col(at, [*counts]),
                )
    made.update_xaxes(steps.settings)
    made.update_yaxes(rangemode="tozero")
    style.set_outer_axis_titles(made, len(counts), "training step", "heads")
    return made.update_layout(showlegend=len(trainings) > 1)


def role_onsets(heads: pd.DataFrame, training_steps: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """The step at which a head takes a role: the first from which it bears it at every later one.

    Rows training, role, layer, head, step; none for a head that does not bear the role at the last step.
    """
    known = _with_training_steps(heads, training_steps).sort_values("step", kind="stable")
    rows = []
    for role in roles:
        bears = known.assign(bears=holding(known, role))
        for (training, layer, head), line in bears.groupby(["training", "layer", "head"]):
            flags = line["bears"].to_numpy()
            if flags[-1]:
                first = len(flags) - int(np.argmin(flags[::-1])) if not flags.all() else 0
                rows.append((training, role, layer, head, int(line["step"].iloc[first])))
    return pd.DataFrame(rows, columns=["training", "role", "layer", "head", "step"])


def plot_role_onsets(onsets: pd.DataFrame, trainings: Sequence[str], measured_steps: Sequence[int]) -> go.Figure:
    """A point a head at the step where it took a role (`taken`), a row a role; `every` are the measured steps."""
    title = "When heads take their roles"
    if onsets.empty:
        return style.empty_figure(title, "no head bears a role at the last step")
    roles = list(dict.fromkeys(onsets["role"]))
    steps = StepAxis(pd.Series(measured_steps))
    made = style.new_figure(title, 160 + 46 * len(roles))
    looks = _training_line_styles(trainings)
    for at, (training, look) in enumerate(looks.items()):
        mine = onsets[onsets["training"] == training]
        # Heads of one role and step stand above each other, trainings beside each other.
        rank = mine.groupby(["role", "step"]).cumcount()
        among = mine.groupby(["role", "step"])["head"].transform("size")
        row = mine["role"].map({role: number for number, role in enumerate(roles)})
        lift = 0.7 * ((at + 0.5) / len(looks) - 0.5) + 0.6 / len(looks) * ((rank + 0.5) / among - 0.5)
        made.add_scatter(
            x=steps.positions(mine["step"]),
            y=row + lift,
            mode="markers",
            marker={"color": look["color"], "size": 7, "opacity": 0.75},
            name=style.escape_label(training),
            customdata=np.stack([mine["layer"], mine["head"], mine["step"]], 1).tolist(),
            hovertemplate="layer %{customdata[0]}, head %{customdata[1]}: from step %{customdata[2]:,}<extra></extra>",
        )
    made.update_xaxes(title_text="training step", range=steps.range, **steps.settings)
    made.update_yaxes(tickvals=list(range(len(roles))), ticktext=roles, range=[len(roles) - 0.5, -0.5])
    return style.fit_legend(made) if len(looks) > 1 else made.update_layout(showlegend=False)


def _with_training_steps(heads: pd.DataFrame, training_steps: pd.DataFrame) -> pd.DataFrame:
    """The heads of the models that carry a step, with their training and step."""
    told = heads.astype({"model": "str"}).merge(training_steps, left_on="model", right_on="label", how="inner")
    return told.sort_values("step", kind="stable")


def _training_line_styles(trainings: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        training: {"color": style.PALETTE[at % 8], "dash": style.LINE_DASHES[at // 8 % 4], "width": 2}
        for at, training in enumerate(trainings)
    }


def _head_line_style(head: int, is_highlighted: bool) -> dict[str, Any]:
    look = {"color": style.PALETTE[head % 8], "dash": style.LINE_DASHES[head // 8 % 4], "width": 1.6}
    return look if is_highlighted else {**look, "color": style.GRID_COLOUR}


def _add_line(
    figure: go.Figure,
    curve: pd.DataFrame,
    column: str,
    label: str,
    line_style: dict[str, Any],
    step_axis: StepAxis,
    show_in_legend: bool,
    panel_position: dict[str, int],
) -> None:
    figure.add_scatter(
        x=step_axis.positions(curve["step"]),
        y=curve[column],
        mode="lines+markers",
        line=line_style,
        marker={"size": 4},
        name=label,
        legendgroup=label,
        showlegend=show_in_legend,
        customdata=curve["step"],
        hovertemplate=f"step %{{customdata:,}}: %{{y:.4g}}<extra>{label}</extra>",
        **panel_position,
    )
