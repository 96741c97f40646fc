"""Panel of the selected heads and of named sets of heads. Both live in the URL."""

import json
from collections.abc import Collection
from itertools import combinations
from typing import Any

import dash_mantine_components as dmc
import pandas as pd
from dash import html

from dashboards.components import column_header
from dashboards.empty_pages import command_for_run
from dashboards.playground.worker import has_worker
from dashboards.view_state import ViewState, format_heads
from headscope.base.heads import Head, format_head
from headscope.results.words import count_nouns
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run

YAML_TOOLTIP = "Download the selected heads and named sets as a study file: headscope run heads.yaml --model NAME=..."
MAX_CHIPS = 24
"""Selected heads that are listed one by one."""


def selection_panel(run: Run, view: ViewState) -> list[Any]:
    """The selected heads, and a comparison of the named sets; empty without either."""
    if not view.selected_heads and not view.head_sets:
        return []
    parts = [*_selected_heads(run, view), *_head_set_table(run, view)]
    return [html.Section(parts, className="selected-heads", **{"aria-label": "Selected heads"})]


def _selected_heads(run: Run, view: ViewState) -> list[Any]:
    if not view.selected_heads:
        return []
    heads = sorted(view.selected_heads)
    chips: list[Any] = []
    for layer, head in heads[:MAX_CHIPS]:
        name, rest = format_head(layer, head), format_heads(view.selected_heads - {(layer, head)})
        href = view.link("", heads=rest) if rest else view.link("", "heads")
        remove = html.A("×", href=href, className="remove-link", **{"aria-label": f"Deselect {name}"})
        chips.append(html.Span([html.A(name, href=view.head_link(layer, head)), remove], className="head-chip"))
    if len(heads) > MAX_CHIPS:
        chips.append(f"and {len(heads) - MAX_CHIPS} more")
    name_input = dmc.TextInput(
        id="head-set-name", placeholder="name", size="xs", w=140, **{"aria-label": "Name of this set"}
    )
    tools = [
        html.Form([name_input, html.Button("Save as a set", type="submit")], id="head-set-form"),
        _ablate_tool(run, view),
        html.Button("CSV of selected heads", id="head-set-csv", type="button", title="Every statistic of these heads"),
        html.Button("YAML", id="head-set-yaml", type="button", title=YAML_TOOLTIP),
        html.A("Clear selection", href=view.link("", "heads")),
    ]
    count = f"{count_nouns(len(heads), 'selected heads')}: "
    return [html.P([html.B(count), *chips]), html.Div(tools, className="toolbar")]


def _ablate_tool(run: Run, view: ViewState) -> html.A | html.Button:
    """Ablate the selected heads: in the playground if the app has models, else by a command to copy."""
    names = ",".join(format_head(layer, head) for layer, head in sorted(view.selected_heads))
    if has_worker():
        heads = names.replace(",", ", ")
        href = view.link("/playground", playground=json.dumps({"heads": heads}))
        return html.A("Ablate in the playground", href=href, **{"data-ablates": heads})
    command = command_for_run(f"headscope ablate --heads {names}", run)
    title = f"Copy the command: {command}"
    return html.Button("Copy ablation command", type="button", title=title, **{"data-copy-text": command})


def _head_set_table(run: Run, view: ViewState) -> list[Any]:
    """One row per set: number of heads and median of the statistic under each model; then the overlaps of sets."""
    if not view.head_sets:
        return []
    caption = (
        f"Named sets: median {statistic(view.statistic_name).label_with_unit}" if view.statistic_name else "Named sets"
    )
    names = [column_header(name) for name in ("set", "heads", *view.shown_models, "")]
    rows = []
    for name, heads in view.head_sets.items():
        remaining = [f"{other}:{format_heads(members)}" for other, members in view.head_sets.items() if other != name]
        medians = [html.Td(_format_median(run, view.statistic_name, model, heads)) for model in view.shown_models]
        select = html.A(name, href=view.link("", heads=format_heads(heads)))
        remove = html.A("remove", href=view.link("", "sets", **({"sets": remaining} if remaining else {})))
        rows.append(html.Tr([html.Th(select, scope="row"), html.Td(str(len(heads))), *medians, html.Td(remove)]))
    table = html.Table([html.Caption(caption), html.Thead(html.Tr(names)), html.Tbody(rows)])
    overlaps = [
        f"{first} and {second} share {count_nouns(len(view.head_sets[first] & view.head_sets[second]), 'heads')}"
        for first, second in combinations(view.head_sets, 2)
    ]
    return [
        html.Div(table, className="scroll", tabIndex=0, role="region", **{"aria-label": caption}),
        *([html.P(f"{'; '.join(overlaps)}.")] if overlaps else []),
    ]


def _format_median(run: Run, statistic_name: str, model: str, heads: Collection[Head]) -> str:
    rows = run.heads[run.heads["model"] == model]
    rows = rows[pd.MultiIndex.from_frame(rows[["layer", "head"]]).isin([*heads])]
    if statistic_name not in rows or rows[statistic_name].isna().all():
        return "–"
    return statistic(statistic_name).format_number(float(rows[statistic_name].median()))
