"""One head in full: what the probes say and show of it, its numbers under every model, and its neighbours."""

from collections.abc import Iterator, Sequence

import pandas as pd

from dashboards.view_state import ViewState, describe_statistic, parse_head
from headscope.report import assembly
from headscope.report.blocks import Block, LazySequence, Link, Links, PageContent, TextBlock, TextTable
from headscope.report.text import column_heading, default_models_with, format_cell, head_mask
from headscope.runs.column_metadata import column, statistic
from headscope.runs.run import Run
from headscope.runs.summary import longest

NAME = "Head"
PATH = "/head"


def controls(run: Run) -> Sequence[str]:
    """The model whose frequencies and distances are drawn."""
    return ("model",) if len(run.heads) else ()


def content(run: Run, view: ViewState, identifier: str = "") -> PageContent:
    """The head that `at` names, such as 3.2; without a name the first of the notable ones."""
    chosen = run.derived(assembly.notable_heads_of_run)
    layer, head = parse_head(identifier, run) if identifier else next(iter(chosen), (0, 0))
    heads = run.heads[head_mask(run.heads, layer, head)]
    group = int(heads["kv_group"].iloc[0]) if len(heads) else 0
    answer, more = assembly.head_sentences(run, view.model, layer, head)
    sections: dict[str, Sequence[Block]] = {
        "": [_neighbour_links(run, view, layer, head), *([TextBlock(more)] if more else [])],
        "What it does": LazySequence(assembly.head_blocks(run, view.model, layer, head)),
        "Numbers": LazySequence(_statistics_table(heads, default_models_with(run, view.model))),
        f"Key group {group}: heads that share these keys": LazySequence(_kv_group_table(run, view, layer, group)),
    }
    why = chosen.get((layer, head))
    lead = " ".join([*answer, f"Key group {group}.", *([f"It is notable: {why}."] if why else [])])
    return PageContent(f"Layer {layer}, head {head}", lead, sections)


def _statistics_table(heads: pd.DataFrame, models: Sequence[str]) -> Iterator[TextTable]:
    rows = {str(row["model"]): row for row in heads.to_dict("records")}
    names = assembly.measured_statistics(heads)
    told = [
        [
            column_heading(name),
            *(format_cell(rows[model], name) if model in rows else "–" for model in models),
        ]
        for name in names
    ]
    defined = {column_heading(name): describe_statistic(name) for name in names}
    yield TextTable(
        "Every statistic under each model; 95 % intervals in brackets", ("statistic", *models), told, defined
    )


def _kv_group_table(run: Run, view: ViewState, layer: int, kv_group: int) -> Iterator[TextTable]:
    """The statistics that come with an interval, of the heads of one key group."""
    heads = run.heads[(run.heads["model"] == view.model) & (run.heads["layer"] == layer)]
    length = longest(run.heads)
    names = [
        name
        for name in assembly.measured_statistics(heads)
        if f"{name}_low" in heads and (name == length or column(name).length is None)
    ]
    rows: list[list[str | Link]] = [
        [
            Link(f"head {row['head']}", view.head_link(layer, int(row["head"]))),
            *(format_cell(row, name) for name in names),
        ]
        for row in heads[heads["kv_group"] == kv_group].to_dict("records")
    ]
    yield TextTable(f"Under {view.model}", ("head", *(statistic(name).worded for name in names)), rows)


def _neighbour_links(run: Run, view: ViewState, layer: int, head: int) -> Links:
    places = sorted(set(run.heads[["layer", "head"]].itertuples(index=False, name=None)))
    steps = {"Previous layer": (-1, 0), "Previous head": (0, -1), "Next head": (0, 1), "Next layer": (1, 0)}
    return Links(
        [
            Link(name, view.head_link(*place))
            for name, (down, across) in steps.items()
            if (place := (layer + down, head + across)) in places
        ]
    )
