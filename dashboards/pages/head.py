"""One head in full: what the probes say and show of it, its numbers under every model, and its neighbours."""

from collections.abc import Iterator, Sequence

import pandas as pd

from dashboards.view import View, described, place_of
from headscope.report import assembly, statistics_text
from headscope.report.blocks import Block, LazySequence, Link, Links, PageContent, TextBlock, TextTable
from headscope.report.text import default_models_with, head_mask
from headscope.runs.column_metadata import column, statistic
from headscope.runs.run import Run
from headscope.runs.summary import longest

NAME = "Head"
PATH = "/head"


def controls(run: Run) -> Sequence[str]:
    """The model whose frequencies and distances are drawn."""
    return ("model",) if len(run.heads) else ()


def content(run: Run, view: View, at: str = "") -> PageContent:
    """The head that `at` names, such as 3.2; without a name the first of the notable ones."""
    chosen = run.derived(assembly.notable_heads_of_run)
    layer, head = place_of(at, run) if at else next(iter(chosen), (0, 0))
    heads = run.heads[head_mask(run.heads, layer, head)]
    group = int(heads["kv_group"].iloc[0]) if len(heads) else 0
    answer, more = assembly.head_sentences(run, view.model, layer, head)
    sections: dict[str, Sequence[Block]] = {
        "": [_ways(run, view, layer, head), *([TextBlock(more)] if more else [])],
        "What it does": LazySequence(assembly.head_blocks(run, view.model, layer, head)),
        "Numbers": LazySequence(_numbers(heads, default_models_with(run, view.model))),
        f"Key group {group}: heads that share these keys": LazySequence(_neighbours(run, view, layer, group)),
    }
    why = chosen.get((layer, head))
    lead = " ".join([*answer, f"Key group {group}.", *([f"It is notable: {why}."] if why else [])])
    return PageContent(f"Layer {layer}, head {head}", lead, sections)


def _numbers(heads: pd.DataFrame, models: Sequence[str]) -> Iterator[TextTable]:
    rows = {str(row["model"]): row for row in heads.to_dict("records")}
    names = assembly.measured_statistics(heads)
    told = [
        [
            statistics_text.column_heading(name),
            *(statistics_text.format_cell(rows[model], name) if model in rows else "–" for model in models),
        ]
        for name in names
    ]
    defined = {statistics_text.column_heading(name): described(name) for name in names}
    yield TextTable(
        "Every statistic under each model; 95 % intervals in brackets", ("statistic", *models), told, defined
    )


def _neighbours(run: Run, view: View, layer: int, group: int) -> Iterator[TextTable]:
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
            *(statistics_text.format_cell(row, name) for name in names),
        ]
        for row in heads[heads["kv_group"] == group].to_dict("records")
    ]
    yield TextTable(f"Under {view.model}", ("head", *(statistic(name).worded for name in names)), rows)


def _ways(run: Run, view: View, layer: int, head: int) -> Links:
    places = sorted(set(run.heads[["layer", "head"]].itertuples(index=False, name=None)))
    steps = {"Previous layer": (-1, 0), "Previous head": (0, -1), "Next head": (0, 1), "Next layer": (1, 0)}
    return Links(
        [
            Link(name, view.head_link(*place))
            for name, (down, across) in steps.items()
            if (place := (layer + down, head + across)) in places
        ]
    )
