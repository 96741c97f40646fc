"""One head in full: what the probes say and show of it, its numbers under every model, and its neighbours."""

from collections.abc import Iterator, Sequence

import pandas as pd

from dashboards.view import View, described, place_of
from headscope.report import outline, wording
from headscope.report.content import Content, Later, Link, Links, Listing, Piece, Words
from headscope.report.words import here, with_others
from headscope.runs.run import Run
from headscope.runs.statistics import column, statistic
from headscope.runs.summary import longest

NAME = "Head"
PATH = "/head"


def controls(run: Run) -> Sequence[str]:
    """The model whose frequencies and distances are drawn."""
    return ("model",) if len(run.heads) else ()


def content(run: Run, view: View, at: str = "") -> Content:
    """The head that `at` names, such as 3.2; without a name the first of the notable ones."""
    chosen = run.derived(outline.notable_of)
    layer, head = place_of(at, run) if at else next(iter(chosen), (0, 0))
    heads = run.heads[here(run.heads, layer, head)]
    group = int(heads["kv_group"].iloc[0]) if len(heads) else 0
    answer, more = outline.head_answer(run, view.model, layer, head)
    sections: dict[str, Sequence[Piece]] = {
        "": [_ways(run, view, layer, head), *([Words(more)] if more else [])],
        "What it does": Later(outline.head_charts(run, view.model, layer, head)),
        "Numbers": Later(_numbers(heads, with_others(run, view.model))),
        f"Key group {group}: heads that share these keys": Later(_neighbours(run, view, layer, group)),
    }
    why = chosen.get((layer, head))
    lead = " ".join([*answer, f"Key group {group}.", *([f"It is notable: {why}."] if why else [])])
    return Content(f"Layer {layer}, head {head}", lead, sections)


def _numbers(heads: pd.DataFrame, models: Sequence[str]) -> Iterator[Listing]:
    rows = {str(row["model"]): row for row in heads.to_dict("records")}
    names = outline.measured(heads)
    told = [
        [wording.heading(name), *(wording.cell(rows[model], name) if model in rows else "–" for model in models)]
        for name in names
    ]
    defined = {wording.heading(name): described(name) for name in names}
    yield Listing("Every statistic under each model; 95 % intervals in brackets", ("statistic", *models), told, defined)


def _neighbours(run: Run, view: View, layer: int, group: int) -> Iterator[Listing]:
    """The statistics that come with an interval, of the heads of one key group."""
    heads = run.heads[(run.heads["model"] == view.model) & (run.heads["layer"] == layer)]
    length = longest(run.heads)
    names = [
        name
        for name in outline.measured(heads)
        if f"{name}_low" in heads and (name == length or column(name).length is None)
    ]
    rows: list[list[str | Link]] = [
        [
            Link(f"head {row['head']}", view.head_link(layer, int(row["head"]))),
            *(wording.cell(row, name) for name in names),
        ]
        for row in heads[heads["kv_group"] == group].to_dict("records")
    ]
    yield Listing(f"Under {view.model}", ("head", *(statistic(name).worded for name in names)), rows)


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
