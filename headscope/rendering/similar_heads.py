"""Heads with a similar profile of statistics: the nearest ones as a table, and all of them as points in two dimensions.

See `headscope.runs.head_profiles` for profiles and their principal components.
"""

from collections.abc import Collection, Iterator

import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import Head
from headscope.plots import style
from headscope.plots.draft import Draft
from headscope.plots.head_scatter import HEAD_COLUMNS, MARKER_OUTLINE
from headscope.rendering.blocks import Block, Chart, Link, Links, TextTable
from headscope.rendering.explorer_blocks import query_link
from headscope.results.words import join_words
from headscope.runs.column_metadata import roles, statistic
from headscope.runs.head_profiles import (
    NO_ROLE,
    Components,
    head_profiles,
    principal_components,
    profile_distances,
    strongest_roles,
)
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with

NEAREST = 5
"""Heads that are listed per model."""
AXIS_STATISTICS = 3
"""Statistics that describe a component."""
TOP_MARGIN = 100
"""Space in px above the plot for two rows of the legend."""


def nearest_profiles(run: Run, model: str, layer: int, head: int) -> Iterator[TextTable]:
    """The heads of each model with the nearest profile, those of `model` first."""
    distances = profile_distances(run, model, layer, head)
    if distances.empty:
        return
    nearest = distances.groupby(level="model", observed=True, sort=False).head(NEAREST)
    links: dict[str, list[Link]] = {}
    labels = dict.fromkeys((model, *default_models_with(run, model)))
    for (label, near_layer, near_head), distance in zip(nearest.index, nearest, strict=True):
        if label in labels:
            links.setdefault(label, []).append(head_link(label, near_layer, near_head, distance))
    rows: list[list[str | Link | Links]] = [[label, Links(links[label])] for label in labels if label in links]
    yield TextTable(
        f"By statistics: root mean square difference of {head_profiles(run).shape[1]} statistics, in standard "
        "deviations over all heads.",
        ("model", "nearest heads and their distance"),
        rows,
    )


def head_link(model: str, layer: int, head: int, distance: float, mark: str = "") -> Link:
    """A link to the page of a head, with its distance."""
    href = query_link(f"/head/{layer}.{head}", model=model)
    return Link(f"L{layer}H{head} {mark}{distance:.{3 if distance < 1 else 2}f}", href)


def components_chart(
    run: Run, model: str, marked: Head | None = None, matching_heads: Collection[Head] | None = None
) -> Iterator[Block]:
    """The heads of a model in the plane of the first two principal components, coloured by their strongest role.

    All heads by default; `matching_heads` are those that pass filters, in the plane of all heads.
    """
    components = principal_components(run)
    if components is None:
        return
    caption = (
        "One point per head: the first two principal components of the standardised statistics of the heads of all "
        "models. Near heads have similar statistics. Colour: the role in which the head ranks highest. "
        f"{_describe_loadings(components, 0)}; {_describe_loadings(components, 1)}."
    )
    yield Chart(plot_components(run, components, model, marked, matching_heads), caption)


def plot_components(
    run: Run,
    components: Components,
    model: str,
    marked: Head | None = None,
    matching_heads: Collection[Head] | None = None,
) -> go.Figure:
    """Plot the `matching_heads` of a model in the components' plane, one colour per role; `marked` gets a ring."""
    if matching_heads is None:
        figure = run.derived(_unmarked_components, components, model)
    else:
        figure = _unmarked_components(run, components, model, matching_heads)
    if marked is None:
        return figure.figure()
    at = components.coordinates.reindex([(model, *marked)]).dropna()
    mark = {
        "type": "scatter",
        "x": at["x"].to_numpy(),
        "y": at["y"].to_numpy(),
        "mode": "markers+text",
        "text": [f"L{marked[0]}H{marked[1]}"] * len(at),
        "textposition": "top center",
        "textfont": {"size": 14, "color": style.HIGHLIGHT_COLOUR},
        "marker": {"symbol": "circle-open", "size": 17, "color": style.HIGHLIGHT_COLOUR, "line": {"width": 3}},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return figure.with_traces([mark]).figure()


def _unmarked_components(
    run: Run, components: Components, model: str, matching_heads: Collection[Head] | None = None
) -> Draft:
    figure = Draft.single(f"Heads by their statistics: {style.escape_label(model)}", 460)
    heads = run.heads[["model", *HEAD_COLUMNS]].assign(role=run.derived(strongest_roles))
    points = heads[heads["model"] == model].join(components.coordinates, on=["model", "layer", "head"])
    if matching_heads is not None:
        points = points[pd.MultiIndex.from_frame(points[["layer", "head"]]).isin([*matching_heads])]
    role_points = [(index, role, points[points["role"] == role]) for index, role in enumerate([NO_ROLE, *roles()])]
    figure.add([_role_trace(members, role, index) for index, role, members in role_points if len(members)])
    for axis, name in enumerate(("xaxis", "yaxis")):
        share = f"{100 * components.shares[axis]:.0f} % of the variance"
        figure.update_axis(name, {"title": {"text": f"component {axis + 1} ({share})"}})
    figure.layout["meta"] = {"model": style.escape_label(model), "heads": True}
    return figure.set_top_margin(TOP_MARGIN)


def _role_trace(members: pd.DataFrame, role: str, index: int) -> dict[str, object]:
    number = index - 1
    colour = (
        "rgba(128,128,128,0.45)" if role == NO_ROLE else style.CATEGORY_PALETTE[number % len(style.CATEGORY_PALETTE)]
    )
    symbol = "circle" if role == NO_ROLE else style.MARKER_SYMBOLS[number // len(style.CATEGORY_PALETTE)]
    return {
        "type": "scatter",
        "x": members["x"].to_numpy(),
        "y": members["y"].to_numpy(),
        "mode": "markers",
        "marker": {"color": colour, "symbol": symbol, "size": 8, "line": MARKER_OUTLINE},
        "customdata": members[HEAD_COLUMNS].to_numpy(object),  # Dash cannot read packed arrays in selections
        "name": role,
        "hovertemplate": f"layer %{{customdata[0]}}, head %{{customdata[1]}}<extra>{role}</extra>",
    }


def _describe_loadings(components: Components, axis: int) -> str:
    loadings = components.loadings[axis]
    largest = loadings.abs().sort_values(ascending=False).index[:AXIS_STATISTICS]
    named = [f"{'+' if loadings[name] > 0 else '−'} {statistic(str(name)).label}" for name in largest]
    return f"Component {axis + 1}: {join_words(named)}"
