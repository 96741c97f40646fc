"""Charts and glossary of path patching."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import head_scatter, shapes, style
from headscope.plots.colour_range import signed_colours
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term, TextTable
from headscope.results.effects.comparison import compared_units
from headscope.results.effects.results import effect_text
from headscope.results.effects.sweep import Effects
from headscope.results.words import format_value, sentence
from probes.patching.analysis import describe_methods, describe_path_sweep, path_name
from probes.patching.paths import PROBE
from probes.patching.paths.declaration import (
    EFFECT,
    LOGITS,
    PATH_ENDS,
    PATH_ESTIMATES,
    PATHS,
    RECEIVER_INPUTS,
    TOGETHER,
)
from probes.patching.paths.results import (
    PATH_COLUMNS,
    PLACE_COLUMNS,
    has_paths,
    path_results,
    strongest_paths,
    sweeps_of_model,
)

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
    last = int(nodes["layer"].max())  # the ends of paths that are no head are right of it, at no layer
    layers = [*range(0, last + 1, max(1, last // 6))]
    figure.update_xaxes(title_text="layer", showgrid=False, tickvals=layers)
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


TABLE_ROWS = 15
"""Paths in the table of the strongest."""

GLOSSARY = (
    Term(
        "Path patching",
        "Activation patching of one path: the queries, keys or values of a receiver head change as if one sender head "
        "had its output of the other run, while all heads and MLPs between them keep their values; then the rest of "
        "the model runs. A path to the logits is the sender's direct effect. An effect of 0 changes nothing; an effect "
        "of 1 moves the metric to its value in the other run.",
        "(m(patched) - m(unpatched)) / (m(source) - m(unpatched)); source: the run that the sender's output comes from",
        (PATHS.name, PATH_ESTIMATES.name),
    ),
)
GRAPH_CAPTION = (
    "One line per path, from the sender to the receiver; wider lines have larger effects. Red: towards the run that "
    "the sender's output comes from; blue: away from it. The dash shows the receiver's input that changes."
)

POSITION_CAPTION = (
    "Mean effect over pairs of patching a path at some positions of its sender or receiver, for the paths of largest "
    "effect at any of them. A position is a token of the clean prompt, by number, a range or a named span."
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The graph of the strongest paths, the strongest paths as a table, and the agreement of estimates."""
    if not has_paths(context.run):
        return
    for effects in context.run.derived(sweeps_of_model, context.selected_model):
        heading = f"{describe_path_sweep(effects)}, {effects.key['prompts']}"
        yield ChartGroup(PROBE.title, heading, _sweep_charts(effects))


def _sweep_charts(effects: Effects) -> Iterator[Chart | TextTable]:
    texts = {result.question: sentence(result) for result in path_results(effects)}
    yield Chart(plot_graph(effects), GRAPH_CAPTION, texts["paths.top"])
    if (effects.units[PLACE_COLUMNS].nunique() > 1).any():
        yield Chart(plot_positions(effects), POSITION_CAPTION)
    rows = [
        [path_name(path), effect_text(effects, path, EFFECT), _format_p(path["p_adjusted"])]
        for _, path in strongest_paths(effects, effects.units, TABLE_ROWS).iterrows()
    ]
    yield TextTable("The paths of largest absolute effect.", ["path", "effect, mean over pairs", "adjusted p"], rows)
    if "estimate" in effects.estimates and len(compared_units(effects, "estimate")) > 2:
        yield Chart(
            plot_agreement(effects),
            "One point per path that was both estimated and patched. On the dashed line the estimate equals the exact "
            "effect.",
            texts.get("paths.agreement", ""),
            half_width=True,
        )


def _format_p(p: float) -> str:
    return "" if pd.isna(p) else format_value(p, ".3g")
