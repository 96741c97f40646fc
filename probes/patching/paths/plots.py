"""Plots of path patching: the graph of the strongest paths, effects by position, estimates against exact effects."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.agreement import compared_units
from headscope.effects.results import effect_text
from headscope.effects.sweep import Effects
from headscope.plots import head_scatter, shapes, style
from headscope.plots.colour_range import signed_colours
from headscope.prompts.token_positions import ALL_TOKENS
from probes.patching.labels import describe_methods, describe_path_sweep, path_name
from probes.patching.paths.analysis import PATH_COLUMNS, PLACE_COLUMNS, strongest_paths
from probes.patching.paths.questions import EFFECT
from probes.patching.paths.schema import LOGITS, PATH_ENDS, RECEIVER_INPUTS, TOGETHER

EDGE_COLUMNS = [name for name in PATH_COLUMNS if name not in PLACE_COLUMNS]
"""Keys of a path without its positions."""
MAX_EDGES = 40
"""Paths in a graph."""
DASHES: dict[str, str] = dict(zip(PATH_ENDS, ("solid", "dash", "dot", "solid"), strict=True))
POSITIVE, NEGATIVE = style.DIVERGING_SCALE[-2], style.DIVERGING_SCALE[1]
MAX_WIDTH = 7.0
"""Width of the strongest path in px."""
MAX_POSITION_PATHS = 20
"""Paths in a plot of effects by position."""
HOVER_POINTS = 9
"""Points on a path that show its effect."""


def plot_graph(effects: Effects) -> go.Figure:
    """The strongest paths of a sweep: senders and receivers by layer and head, the logits at the right.

    Width and colour of a line show its effect, red towards the source run; its dash shows the changed input.
    """
    paths = strongest_paths(effects, effects.units, len(effects.units))
    edges = paths.drop_duplicates(EDGE_COLUMNS)[:MAX_EDGES]  # of a path at several positions, the strongest
    heads = np.concatenate(
        [
            edges[["sender_layer", "sender_head"]],
            edges.loc[edges["receiver_layer"] >= 0, ["receiver_layer", "receiver_head"]],
        ]
    )
    nodes = pd.DataFrame(heads, columns=["layer", "head"]).drop_duplicates().sort_values(["layer", "head"])
    right, middle = float(nodes["layer"].max()) + 1.5, float(nodes["head"].mean())
    ends = {LOGITS: ("logits", right, middle), TOGETHER: ("receivers", right, middle - 1)}
    ends = {layer: end for layer, end in ends.items() if (edges["receiver_layer"] == layer).any()}
    largest = float(edges["effect"].abs().max())
    figure = style.new_figure("", 560).update_layout(title=_title(effects, len(edges)))
    for _, path in edges.iloc[::-1].iterrows():  # the strongest on top
        _add_edge(figure, path, effect_text(effects, path, EFFECT), ends, largest)
    _add_legend(figure, [name for name in RECEIVER_INPUTS if name in set(edges["through"])])
    labels = [
        *nodes.apply(lambda node: f"L{node['layer']}H{node['head']}", axis=1),
        *(label for label, _, _ in ends.values()),
    ]
    figure.add_scatter(
        x=[*nodes["layer"], *(x for _, x, _ in ends.values())],
        y=[*nodes["head"], *(y for _, _, y in ends.values())],
        mode="markers+text",
        marker={"size": 9, "color": style.TEXT_COLOUR, "line": head_scatter.MARKER_OUTLINE},
        text=labels,
        textposition="top center",
        textfont={"size": 10},
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title_text="layer", showgrid=False)
    figure.update_yaxes(title_text="head", showgrid=False)
    return style.set_metadata(style.set_top_margin(figure, 90), value="effect")


def plot_positions(effects: Effects) -> go.Figure:
    """Heatmap of the mean effect by path and position, for the paths of largest effect at any position.

    Columns are the positions of the sender, or of the receiver if it has more; the others are in the path's name.
    """
    units = effects.units
    column = max(PLACE_COLUMNS, key=lambda name: units[name].nunique())
    names = [path_name(path) for _, path in units.assign(**{column: ALL_TOKENS}).iterrows()]
    rows = units.assign(name=names, place=units[column].astype(str))
    by_path = rows.pivot_table(index="name", columns="place", values="effect", sort=False)
    places = sorted(map(str, by_path.columns), key=_place_order)
    by_path = by_path[places]
    top = by_path.loc[by_path.abs().max(axis=1).nlargest(MAX_POSITION_PATHS).index[::-1]]
    texts = {
        key: effect_text(effects, path, EFFECT)
        for key, (_, path) in zip(zip(rows["name"], rows["place"], strict=True), rows.iterrows(), strict=True)
    }
    limit = max(float(np.nanmax(np.abs(top.to_numpy()))), 1e-3)  # few positions matter: a quantile would hide them
    end, labels = column.removesuffix("_positions"), [style.escape_label(place) for place in top.columns]
    ticks = {"tickvals": [*range(len(labels))], "ticktext": labels}
    figure = shapes.matrix(
        _title(effects, len(top), "by position"),
        top.set_axis(range(len(labels)), axis=1),
        "%{y}, position %{x}<br>effect %{hovertext}",
        {**ticks, "title_text": f"positions of the {end}", "showgrid": False},
        {"type": "category", "showgrid": False},
        height=200 + 20 * len(top),
        top_margin=62,
        hovertext=[[texts.get((name, place), "") for place in top.columns] for name in top.index],
        **signed_colours(limit, "effect"),
    )
    return style.set_metadata(figure, value="effect", x="position")


def _place_order(place: str) -> tuple[int, int]:
    """All positions together, then single tokens in their order, then named spans and ranges."""
    if place == ALL_TOKENS:
        return 0, 0
    return (1, int(place)) if place.isdigit() else (2, 0)


def plot_agreement(effects: Effects) -> go.Figure:
    """Scatter plot of the estimated against the exact effect, one point per path; the dashed line is y = x."""
    both = compared_units(effects, "estimate").join(effects.units[PATH_COLUMNS])
    figure = style.new_figure("").update_layout(title=_title(effects, len(both)))
    for name in PATH_ENDS:
        rows = both[both["through"] == name]
        if len(rows):
            figure.add_scatter(
                x=rows["exact"],
                y=rows["estimate"],
                mode="markers",
                marker={"symbol": style.MARKER_SYMBOLS[PATH_ENDS.index(name)], "size": 7},
                text=[path_name(path) for _, path in rows.iterrows()],
                hovertemplate="%{text}<br>exact %{x:+.3f}<br>estimate %{y:+.3f}<extra></extra>",
                name=name,
            )
    values = both[["exact", "estimate"]].to_numpy(dtype=np.float64)
    head_scatter.add_diagonal(figure, [values.min(), values.max()])
    shapes.label_axes(style.set_top_margin(figure, 90), "exact effect", "estimated effect")
    return style.set_metadata(figure, value="estimated effect", x="exact effect")


def _add_edge(
    figure: go.Figure, path: pd.Series, effect: str, ends: Mapping[int, tuple[str, float, float]], largest: float
) -> None:
    """Add one path as a line; its hover text has its `effect`. `ends` are the ends of paths that are no head."""
    _, *end = ends.get(path["receiver_layer"], ("", path["receiver_layer"], path["receiver_head"]))
    share = np.linspace(0, 1, HOVER_POINTS)
    size = abs(path["effect"]) / largest
    text = f"{path_name(path)}<br>effect {effect}"
    figure.add_scatter(
        x=path["sender_layer"] + share * (end[0] - path["sender_layer"]),
        y=path["sender_head"] + share * (end[1] - path["sender_head"]),
        mode="lines",
        line={
            "width": max(1.0, MAX_WIDTH * size),
            "color": POSITIVE if path["effect"] >= 0 else NEGATIVE,
            "dash": DASHES[path["through"]],
        },
        opacity=0.35 + 0.6 * size,
        name=path_name(path),
        text=[text] * HOVER_POINTS,
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
    )


def _add_legend(figure: go.Figure, inputs: list[str]) -> None:
    """Name the dash of each changed input."""
    for name in inputs:
        line = {"color": style.TEXT_COLOUR, "dash": DASHES[name], "width": 2}
        figure.add_scatter(x=[None], y=[None], mode="lines", line=line, name=f"through {name}", hoverinfo="skip")
    figure.update_layout(showlegend=True)


def _title(effects: Effects, drawn_count: int, suffix: str = "") -> dict[str, object]:
    prompts, model = style.escape_label(effects.key["prompts"]), style.escape_label(effects.model)
    text = f"{describe_path_sweep(effects)}{suffix and f', {suffix}'}, {prompts}: {model}"
    return style.title_with_subtitle(text, f"{drawn_count} paths drawn; {describe_methods(effects, 'paths')}")
