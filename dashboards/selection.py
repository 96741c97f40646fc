"""The heads that a user picked, and sets of them that were given names. They live in the URL."""

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import dash_mantine_components as dmc
import pandas as pd
from dash import html

from dashboards.view import ViewState
from headscope.plots.highlight import HeadIndex
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run

YAML_TOOLTIP = (
    "These heads and the named sets as a study file of their influence: headscope run heads.yaml --model NAME=..."
)
MAX_CHIPS = 24
"""Picked heads that are named one by one."""


def selection_panel(run: Run, view: ViewState) -> list[Any]:
    """The picked heads and the named sets, compared; nothing where there are none."""
    if not view.selected_heads and not view.head_sets:
        return []
    parts = [*_selected_heads(view), *_head_set_table(run, view)]
    return [html.Section(parts, className="tray", **{"aria-label": "Picked heads"})]


def format_heads(heads: Collection[HeadIndex]) -> str:
    """The heads as the URL has them."""
    return "_".join(f"{layer}.{head}" for layer, head in sorted(heads))


def _selected_heads(view: ViewState) -> list[Any]:
    if not view.selected_heads:
        return []
    heads = sorted(view.selected_heads)
    links: list[Any] = []
    for layer, head in heads[:MAX_CHIPS]:
        rest = format_heads(view.selected_heads - {(layer, head)})
        without = view.link("", pick=rest) if rest else view.link("", "pick")
        drop = html.A("×", href=without, className="drop", **{"aria-label": f"Leave out L{layer}H{head}"})
        links += [html.Span([html.A(f"L{layer}H{head}", href=view.head_link(layer, head)), drop], className="chip")]
    if len(heads) > MAX_CHIPS:
        links.append(f"and {len(heads) - MAX_CHIPS} more")
    name = html.Form(
        [
            dmc.TextInput(id="set-name", placeholder="name", size="xs", w=140, **{"aria-label": "Name of this set"}),
            html.Button("Keep as a set", type="submit"),
        ],
        id="set-form",
    )
    tools = [
        name,
        html.Button("YAML", id="set-yaml", type="button", title=YAML_TOOLTIP),
        html.A("Pick none", href=view.link("", "pick")),
    ]
    count = f"{len(heads)} picked head{'s' if len(heads) > 1 else ''}: "
    return [html.P([html.B(count), *links]), html.Div(tools, className="tools")]


def _head_set_table(run: Run, view: ViewState) -> list[Any]:
    """A row a set: its heads, and its median of the statistic under each model; then how sets overlap."""
    if not view.head_sets:
        return []
    shown = statistic(view.statistic_name) if view.statistic_name else None
    names = [html.Th(name, scope="col") for name in ("set", "heads", *view.shown_models, "")]
    rows = []
    for name, heads in view.head_sets.items():
        others = [f"{other}:{format_heads(of)}" for other, of in view.head_sets.items() if other != name]
        medians = [html.Td(_format_median(run, view.statistic_name, model, heads)) for model in view.shown_models]
        show = html.A(name, href=view.link("", pick=format_heads(heads)))
        drop = html.A("remove", href=view.link("", "sets", **({"sets": others} if others else {})))
        rows.append(html.Tr([html.Th(show, scope="row"), html.Td(str(len(heads))), *medians, html.Td(drop)]))
    caption = f"Named sets: median {shown.worded}" if shown else "Named sets"
    table = html.Table([html.Caption(caption), html.Thead(html.Tr(names)), html.Tbody(rows)])
    both = [
        f"{first} and {second} share {len(view.head_sets[first] & view.head_sets[second])} heads"
        for first, second in combinations(view.head_sets, 2)
    ]
    return [
        html.Div(table, className="scroll", tabIndex=0, role="region", **{"aria-label": caption}),
        *_sentence_paragraph(both),
    ]


def _sentence_paragraph(sentences: Sequence[str]) -> list[Any]:
    return [html.P(f"{'; '.join(sentences)}.")] if sentences else []


def _format_median(run: Run, statistic_name: str, model: str, heads: Collection[HeadIndex]) -> str:
    mine = run.heads[run.heads["model"] == model]
    kept = mine[pd.MultiIndex.from_frame(mine[["layer", "head"]]).isin(list(heads))]
    return (
        statistic(statistic_name).number(float(kept[statistic_name].median()))
        if statistic_name in kept and kept[statistic_name].notna().any()
        else "–"
    )
