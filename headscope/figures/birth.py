"""How heads come into being: a statistic and roles against training step, of one training or of several."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style
from headscope.figures.marks import Head
from headscope.figures.steps import Steps
from headscope.runs.roles import holding
from headscope.runs.statistics import statistic

MOST_LAYERS = 12
"""Panels of layers that are drawn."""


def by_layer(heads: pd.DataFrame, name: str, course: pd.DataFrame, picked: Collection[Head] = ()) -> go.Figure:
    """The statistic against training step, a panel a layer.

    Of one training a line a head; of several a line a training, the median over the layer's heads, and beside it the
    heads that are picked. Of more than twelve layers evenly spread ones are drawn.
    """
    shown = statistic(name)
    title = f"{shown.title} during training, by layer"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    known = _known(heads, course).dropna(subset=[name])
    if known.empty:
        return style.nothing(title, "no model carries a training step")
    every = sorted(known["layer"].unique())
    layers = [
        every[at] for at in np.unique(np.linspace(0, len(every) - 1, min(len(every), MOST_LAYERS)).round().astype(int))
    ]
    trainings = list(dict.fromkeys(course["training"]))
    made = style.panels(title, [f"layer {layer}" for layer in layers], height=300)
    steps = Steps(known["step"])
    for at, layer in enumerate(layers):
        mine, place = known[known["layer"] == layer], style.place(at, layers)
        if len(trainings) == 1:
            for head, line in mine.groupby("head"):
                look = _head_look(int(head), not picked or (layer, head) in picked)
                _line(made, line, name, f"head {head}", look, steps, at == 0, place)
            continue
        for training, look in _training_looks(trainings).items():
            ours = mine[mine["training"] == training]
            middle = ours.groupby("step", as_index=False)[name].median()
            _line(made, middle, name, style.text(training), look, steps, at == 0, place)
            for head in sorted(head for where, head in picked if where == layer):
                line = ours[ours["head"] == head]
                thin = {**look, "width": 1, "dash": "dot"}
                _line(made, line, name, f"{style.text(training)}, head {head}", thin, steps, False, place)
    made.update_xaxes(steps.axis)
    if shown.log_scale:
        made.update_yaxes(axes.log_axis(known[name], sparse=True))
    style.outer_titles(made, len(layers), "training step", shown.worded)
    return made.update_layout(showlegend=True)


def bearing(heads: pd.DataFrame, course: pd.DataFrame, roles: Sequence[str]) -> go.Figure:
    """How many heads bear each role against training step: a panel a role, a line a training."""
    title = "Heads that bear a role, during training"
    known = _known(heads, course)
    counts = {
        role: known.assign(bears=holding(known, role)).groupby(["training", "step"])["bears"].sum() for role in roles
    }
    counts = {role: count for role, count in counts.items() if count.any()}
    if not counts:
        return style.nothing(title, "no head bears a role at any step")
    trainings = list(dict.fromkeys(course["training"]))
    steps = Steps(known["step"])
    made = style.panels(title, list(counts), height=260)
    for at, (role, count) in enumerate(counts.items()):
        for training, look in _training_looks(trainings).items():
            if training in count.index.get_level_values("training"):
                line = count.loc[training].rename(role).reset_index()
                _line(made, line, role, style.text(training), look, steps, at == 0, style.place(at, [*counts]))
    made.update_xaxes(steps.axis)
    made.update_yaxes(rangemode="tozero")
    style.outer_titles(made, len(counts), "training step", "heads")
    return made.update_layout(showlegend=len(trainings) > 1)


def taken(heads: pd.DataFrame, course: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """The step at which a head takes a role: the first from which it bears it at every later one.

    Rows training, role, layer, head, step; none for a head that does not bear the role at the last step.
    """
    known = _known(heads, course).sort_values("step", kind="stable")
    rows = []
    for role in roles:
        bears = known.assign(bears=holding(known, role))
        for (training, layer, head), line in bears.groupby(["training", "layer", "head"]):
            flags = line["bears"].to_numpy()
            if flags[-1]:
                first = len(flags) - int(np.argmin(flags[::-1])) if not flags.all() else 0
                rows.append((training, role, layer, head, int(line["step"].iloc[first])))
    return pd.DataFrame(rows, columns=["training", "role", "layer", "head", "step"])


def when_taken(taken: pd.DataFrame, trainings: Sequence[str], every: Sequence[int]) -> go.Figure:
    """A point a head at the step where it took a role (`taken`), a row a role; `every` are the measured steps."""
    title = "When heads take their roles"
    if taken.empty:
        return style.nothing(title, "no head bears a role at the last step")
    roles = list(dict.fromkeys(taken["role"]))
    steps = Steps(pd.Series(every))
    made = style.figure(title, 160 + 46 * len(roles))
    looks = _training_looks(trainings)
    for at, (training, look) in enumerate(looks.items()):
        mine = taken[taken["training"] == training]
        # Heads of one role and step stand above each other, trainings beside each other.
        rank = mine.groupby(["role", "step"]).cumcount()
        among = mine.groupby(["role", "step"])["head"].transform("size")
        row = mine["role"].map({role: number for number, role in enumerate(roles)})
        lift = 0.7 * ((at + 0.5) / len(looks) - 0.5) + 0.6 / len(looks) * ((rank + 0.5) / among - 0.5)
        made.add_scatter(
            x=steps.places(mine["step"]),
            y=row + lift,
            mode="markers",
            marker={"color": look["color"], "size": 7, "opacity": 0.75},
            name=style.text(training),
            customdata=np.stack([mine["layer"], mine["head"], mine["step"]], 1).tolist(),
            hovertemplate="layer %{customdata[0]}, head %{customdata[1]}: from step %{customdata[2]:,}<extra></extra>",
        )
    made.update_xaxes(title_text="training step", range=steps.range, **steps.axis)
    made.update_yaxes(tickvals=list(range(len(roles))), ticktext=roles, range=[len(roles) - 0.5, -0.5])
    return style.room_for_legend(made) if len(looks) > 1 else made.update_layout(showlegend=False)


def _known(heads: pd.DataFrame, course: pd.DataFrame) -> pd.DataFrame:
    """The heads of the models that carry a step, with their training and step."""
    told = heads.astype({"model": "str"}).merge(course, left_on="model", right_on="label", how="inner")
    return told.sort_values("step", kind="stable")


def _training_looks(trainings: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        training: {"color": style.PALETTE[at % 8], "dash": style.DASHES[at // 8 % 4], "width": 2}
        for at, training in enumerate(trainings)
    }


def _head_look(head: int, full: bool) -> dict[str, Any]:
    look = {"color": style.PALETTE[head % 8], "dash": style.DASHES[head // 8 % 4], "width": 1.6}
    return look if full else {**look, "color": style.GRID}


def _line(
    made: go.Figure,
    line: pd.DataFrame,
    name: str,
    called: str,
    look: dict[str, Any],
    steps: Steps,
    in_legend: bool,
    place: dict[str, int],
) -> None:
    made.add_scatter(
        x=steps.places(line["step"]),
        y=line[name],
        mode="lines+markers",
        line=look,
        marker={"size": 4},
        name=called,
        legendgroup=called,
        showlegend=in_legend,
        customdata=line["step"],
        hovertemplate=f"step %{{customdata:,}}: %{{y:.4g}}<extra>{called}</extra>",
        **place,
    )
