"""One head in full: its numbers under every model, its lengths, its pairs, its retrieval and its neighbours."""

from collections.abc import Iterator

import pandas as pd

from dashboards.content import Content, Link, Links, Part, Table, Words
from dashboards.view import View, described, place_of, statistics
from headscope.chart import Chart
from headscope.figures import influence, lengths, needle, rotary
from headscope.figures.style import worded
from headscope.findings import notable, of_head
from headscope.report import told
from headscope.store import Run
from headscope.summary import longest, retrieval_rows, statistic

NAME = "Head"
PATH = "/head"
CONTROLS = ("model",)


def content(run: Run, view: View, at: str = "") -> Content:
    """The head that `at` names, such as 3.2; without a name the first of the notable ones."""
    chosen = notable(run.heads)
    layer, head = place_of(at, run) if at else next(iter(chosen), (0, 0))
    heads = run.heads[(run.heads["layer"] == layer) & (run.heads["head"] == head)]
    group = int(heads["kv_group"].iloc[0]) if len(heads) else 0
    facts = of_head(run, view.model, layer, head, group)
    sections: dict[str, list[Part]] = {
        "": [_ways(run, view, layer, head), Words(facts)],
        "Lengths, pairs and retrieval": [
            *_lengths(run, layer, head),
            *_pairs(run, view, layer, head, group),
            *_retrieval(run, view, layer, head),
        ],
        "Numbers": [_numbers(run, heads)],
        f"Key group {group}: heads that share these keys": [_neighbours(run, view, layer, group)],
    }
    why = chosen.get((layer, head))
    lead = f"Key group {group}. {f'Chosen for: {why}.' if why else ''}"
    return Content(f"Layer {layer}, head {head}", lead, {name: parts for name, parts in sections.items() if parts})


def _lengths(run: Run, layer: int, head: int) -> Iterator[Chart]:
    if "attention" in run.tables:
        attention = _rows(run, "attention", layer, head)
        yield Chart(
            lengths.growth(attention, [(layer, head)]),
            "Both axes are logarithmic. The dotted diagonal is uniform attention, which uses every visible key; the "
            "dotted horizontal is a length that does not grow.",
            half=True,
        )


def _pairs(run: Run, view: View, layer: int, head: int, group: int) -> Iterator[Chart]:
    if "pairs" in run.tables:
        yield Chart(
            rotary.spectrum(_rows(run, "pairs", layer, head), layer, head),
            "Above: the frequency of each rotary pair. Below: how much the pair moves the logits. Error bars are one "
            "standard error.",
            half=True,
        )
    if "positions" in run.tables:
        yield Chart(
            influence.spectrum(run.positions, view.model, layer, group),
            "Frequencies of the key group: the checkpoint's own, where learning started, and as they are.",
            half=True,
        )
    if "distance" in run.tables:
        yield Chart(
            rotary.profile(_rows(run, "distance", layer, head), layer, head, view.model),
            "Red pairs raise the logit of a key at that distance, blue pairs lower it.",
            half=True,
        )


def _retrieval(run: Run, view: View, layer: int, head: int) -> Iterator[Chart]:
    if "retrieval" in run.tables:
        caption = "Share of the needle that this head copies while the model answers right, by length and depth."
        yield Chart(needle.head_map(run.derived(retrieval_rows), view.model, layer, head), caption, half=True)


def _rows(run: Run, name: str, layer: int, head: int) -> pd.DataFrame:
    """The head's rows of a table, its models in the order of the study."""
    frame = run.table(name)
    mine = frame[(frame["layer"] == layer) & (frame["head"] == head)]
    return mine.assign(model=mine["model"].astype(pd.CategoricalDtype(run.models)))


def _numbers(run: Run, heads: pd.DataFrame) -> Table:
    rows = {str(row["model"]): row for row in heads.to_dict("records")}
    defined = {worded(statistic(name)): described(name) for name in statistics(heads)}
    cells = [
        [label, *(told(rows[model], name) if model in rows else "–" for model in run.models)]
        for label, name in zip(defined, statistics(heads), strict=True)
    ]
    return Table(
        "Every statistic under every model; 95 % intervals in brackets", ("statistic", *run.models), cells, defined
    )


def _neighbours(run: Run, view: View, layer: int, group: int) -> Table:
    heads = run.heads[(run.heads["model"] == view.model) & (run.heads["layer"] == layer)]
    ess2 = longest(run.heads)
    names = [
        name for name in (ess2, "growth", "cov", "retrieval", "influence_joint") if name and name in statistics(heads)
    ]
    rows: list[list[str | Link]] = [
        [Link(f"head {row['head']}", view.head_link(layer, int(row["head"]))), *(told(row, name) for name in names)]
        for row in heads[heads["kv_group"] == group].to_dict("records")
    ]
    return Table(f"Under {view.model}", ("head", *(worded(statistic(name)) for name in names)), rows)


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
