"""The heads that a user picked, and sets of them that were given names. They live in the URL."""

from collections.abc import Collection, Sequence
from itertools import combinations
from typing import Any

import dash_mantine_components as dmc
import pandas as pd
from dash import html

from dashboards.view import View
from headscope.plots.highlight import HeadIndex
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run

YAML = "These heads and the named sets as a study file of their influence: headscope run heads.yaml --model NAME=..."
MOST = 24
"""Picked heads that are named one by one."""


def tray(run: Run, view: View) -> list[Any]:
    """The picked heads and the named sets, compared; nothing where there are none."""
    if not view.picked and not view.sets:
        return []
    parts = [*_picked(view), *_sets(run, view)]
    return [html.Section(parts, className="tray", **{"aria-label": "Picked heads"})]


def places(heads: Collection[HeadIndex]) -> str:
    """The heads as the URL has them."""
    return "_".join(f"{layer}.{head}" for layer, head in sorted(heads))


def _picked(view: View) -> list[Any]:
    if not view.picked:
        return []
    heads = sorted(view.picked)
    links: list[Any] = []
    for layer, head in heads[:MOST]:
        rest = places(view.picked - {(layer, head)})
        without = view.link("", pick=rest) if rest else view.link("", "pick")
        drop = html.A("×", href=without, className="drop", **{"aria-label": f"Leave out L{layer}H{head}"})
        links += [html.Span([html.A(f"L{layer}H{head}", href=view.head_link(layer, head)), drop], className="chip")]
    if len(heads) > MOST:
        links.append(f"and {len(heads) - MOST} more")
    name = html.Form(
        [
            dmc.TextInput(id="set-name", placeholder="name", size="xs", w=140, **{"aria-label": "Name of this set"}),
            html.Button("Keep as a set", type="submit"),
        ],
        id="set-form",
    )
    tools = [
        name,
        html.Button("YAML", id="set-yaml", type="button", title=YAML),
        html.A("Pick none", href=view.link("", "pick")),
    ]
    count = f"{len(heads)} picked head{'s' if len(heads) > 1 else ''}: "
    return [html.P([html.B(count), *links]), html.Div(tools, className="tools")]


def _sets(run: Run, view: View) -> list[Any]:
    """A row a set: its heads, and its median of the statistic under each model; then how sets overlap."""
    if not view.sets:
        return []
    shown = statistic(view.stat) if view.stat else None
    names = [html.Th(name, scope="col") for name in ("set", "heads", *view.models, "")]
    rows = []
    for name, heads in view.sets.items():
        others = [f"{other}:{places(of)}" for other, of in view.sets.items() if other != name]
        medians = [html.Td(_median(run, view.stat, model, heads)) for model in view.models]
        show = html.A(name, href=view.link("", pick=places(heads)))
        drop = html.A("remove", href=view.link("", "sets", **({"sets": others} if others else {})))
        rows.append(html.Tr([html.Th(show, scope="row"), html.Td(str(len(heads))), *medians, html.Td(drop)]))
    caption = f"Named sets: median {shown.worded}" if shown else "Named sets"
    table = html.Table([html.Caption(caption), html.Thead(html.Tr(names)), html.Tbody(rows)])
    both = [
        f"{first} and {second} share {len(view.sets[first] & view.sets[second])} heads"
        for first, second in combinations(view.sets, 2)
    ]
    return [html.Div(table, className="scroll", tabIndex=0, role="region", **{"aria-label": caption}), *_told(both)]


def _told(sentences: Sequence[str]) -> list[Any]:
    return [html.P(f"{'; '.join(sentences)}.")] if sentences else []


def _median(run: Run, name: str, model: str, heads: Collection[HeadIndex]) -> str:
    mine = run.heads[run.heads["model"] == model]
    kept = mine[pd.MultiIndex.from_frame(mine[["layer", "head"]]).isin(list(heads))]
    return statistic(name).number(float(kept[name].median())) if name in kept and kept[name].notna().any() else "–"
