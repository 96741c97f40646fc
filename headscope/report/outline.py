"""What a report or a page is made of, in order: what every probe says of a run, and which heads to show.

Asks through the door and names no probe. Charts are drawn when they are asked for; those that cannot be drawn are told
of and left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pandas as pd

from headscope import door
from headscope.door import Kind, Probe
from headscope.errors import BrokenProbe
from headscope.figures.heads import small
from headscope.figures.marks import Head
from headscope.report.content import Chart, Content, Finding, Group, Later, Overview, Piece, Shown, Term
from headscope.report.words import shown_at_first
from headscope.runs.courses import courses
from headscope.runs.run import Run
from headscope.runs.statistics import by_length, column, statistics
from headscope.runs.summary import longest, moved

MOST_HEADS = 6
"""Heads that are drawn one by one."""


def shown(run: Run, model: str = "", heads: pd.DataFrame | None = None, models: Sequence[str] | None = None) -> Shown:
    """The run as charts are drawn from it: `model` in view (the first one), `heads` as a filter left them, `models`
    (few of them) in this order, the first being what others are compared with."""
    labels = shown_at_first(run) if models is None else models
    every = run.heads
    chosen = notable(every[every["model"].isin(labels)])
    kept = every if heads is None else heads
    return Shown(
        run,
        labels,
        kept[kept["model"].isin(labels)],
        model or next(iter(labels), ""),
        dict(list(chosen.items())[:MOST_HEADS]),
    )


def notable(heads: pd.DataFrame) -> dict[Head, str]:
    """Heads (layer, head) to show, each with the reason, judged by the first model and by change against it."""
    chosen: dict[Head, str] = {}
    for (layer, head), reason in _reasons(heads) if len(heads) else ():
        place = int(layer), int(head)
        chosen[place] = f"{chosen[place]}; {reason}" if place in chosen else reason
    return chosen


def notable_of(run: Run) -> dict[Head, str]:
    """`notable` of all models of the run."""
    return notable(run.heads)


def _reasons(heads: pd.DataFrame) -> Iterator[tuple[Head, str]]:
    name, labels = longest(heads), [*heads["model"].unique()]
    first = heads[heads["model"] == labels[0]].set_index(["layer", "head"])
    if name is not None:
        order = first[name].dropna().sort_values().index
        yield order[-1], "largest effective length"
        yield order[0], "smallest effective length"
        yield order[len(order) // 2], "median effective length"
    if "growth" in first and (growth := first["growth"].dropna()).size:
        yield growth.index[int(growth.argmax())], "highest growth exponent"
        yield growth.index[int(growth.argmin())], "lowest growth exponent"
    for best, known in statistics().items():
        if known.best and best in first and (values := first[best].dropna()).size:
            yield values.index[int(values.argmax())], f"highest {known.label}"
    for label in labels[1:]:
        if name is not None and (change := moved(heads, name, str(label))).size:
            yield change.index[int(change.abs().argmax())], f"largest change of effective length under {label}"


def measured(heads: pd.DataFrame) -> list[str]:
    """The statistics of the per-head table that have a number; of one by length the longest comes first."""
    columns = [*map(str, heads)]
    named = (
        name
        for stem in statistics()
        for name in ([stem] if stem in columns else reversed(by_length(columns, stem)))
        if heads[name].notna().any()
    )
    return [*named]


def statistics_of(run: Run) -> list[str]:
    """`measured` of the run's heads, found once."""
    return run.derived(_measured)


def _measured(run: Run) -> list[str]:
    return measured(run.heads)


def having(run: Run, name: str) -> list[str]:
    """The models that have a number in that column of the per-head table."""
    known = run.heads.dropna(subset=[name])["model"].astype(str).unique() if name in run.heads else ()
    return [label for label in run.models if label in known]


def measuring(name: str) -> Probe | None:
    """The probe that measures that statistic."""
    found = (probe for probe, declared in door.parts("statistics") if {name, column(name).stem} & {*declared})
    return next(found, None)


def steps(run: Run) -> dict[str, int]:
    """The training step of each model that is a checkpoint of a training."""
    course = courses(run.manifest["models"])
    return {str(label): int(step) for label, step in zip(course["label"], course["step"], strict=True)}


def findings(run: Run) -> dict[str, list[Finding]]:
    """What every probe finds in the run, by topic."""
    return _by_topic(chain.from_iterable(run.derived(_findings).values()))


def findings_of(run: Run, probe: Probe) -> dict[str, list[Finding]]:
    """What one probe finds in the run, by topic."""
    return _by_topic(run.derived(_findings).get(probe.name, ()))


def _findings(run: Run) -> dict[str, list[Finding]]:
    """What each probe finds, by its name."""
    return {probe.name: [*found] for probe, found in door.answers("findings", run)}


def _by_topic(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    told: dict[str, list[Finding]] = {}
    for finding in findings:
        told.setdefault(finding.topic, []).append(finding)
    return told


def chapters(shown: Shown, topic: str = "") -> dict[str, list[Group]]:
    """What a report shows, by chapter, drawn; groups and chapters without charts are left out.

    With a `topic`, only groups that have it in the name of their chapter or in their heading.
    """
    told: dict[str, list[Group]] = {}
    for probe, groups in door.answers("charts", shown):
        for group in groups:
            named = topic.casefold() in f"{group.chapter}\n{group.heading}".casefold()
            if named and (charts := [*_drawn(probe, group)]):
                told.setdefault(group.chapter, []).append(replace(group, charts=charts))
    return told


def glance(shown: Shown) -> Iterator[Piece]:
    """What a run shows first: a small matrix of every model, and what the probes show on the first page of the app."""
    if name := longest(shown.heads):
        yield Chart(
            small(shown.heads, name), "A cell is a head, the first layer at the bottom; one scale for all models."
        )
    for charts in charts_on(shown, "/").values():
        yield from charts


def charts_on(shown: Shown, page: str) -> dict[str, Sequence[Piece]]:
    """What the probes show on that page of the app, by heading, drawn when it is reached."""
    told: dict[str, list[Iterator[Piece]]] = {}
    for probe, groups in door.answers("charts", shown):
        for group in groups:
            if page in group.page.split():
                told.setdefault(group.heading or group.chapter, []).append(_drawn(probe, group))
    return {heading: Later(chain(*charts)) for heading, charts in told.items()}


def charts_of(shown: Shown, probe: Probe) -> dict[str, Sequence[Piece]]:
    """What one probe shows, by heading, drawn when it is reached. Raises BrokenProbe where it cannot."""
    told: dict[str, list[Iterator[Piece]]] = {}
    for group in _asked(probe, "charts", shown) or ():
        told.setdefault(group.heading, []).append(_drawn(probe, group))
    return {heading: Later(chain(*charts)) for heading, charts in told.items()}


def page_of(shown: Shown, probe: Probe) -> Content | None:
    """The page that a probe draws itself, None where it draws none. Raises BrokenProbe where it cannot."""
    page: Content | None = _asked(probe, "page", shown)
    return page


def head_answer(run: Run, model: str, layer: int, head: int) -> tuple[list[str], list[str]]:
    """What the head is in `model`: the first sentence of every probe, and what else they say."""
    told = [list(found) for _, found in door.answers("head_findings", run, model, layer, head)]
    return [found[0] for found in told if found], [sentence for found in told for sentence in found[1:]]


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Piece]:
    """What the probes show of one head, made when it is reached: what they tell in words and tables, then charts."""
    charts: list[Iterator[Piece]] = []
    for probe, ask in door.parts("head_charts"):
        parts = _one_by_one(probe, "head_charts", ask, run, model, layer, head)
        for part in parts:
            if isinstance(part, Chart):
                charts.append(chain([part], parts))
                break
            yield part
    yield from chain(*charts)


def glossary(run: Run) -> list[Term]:
    """The words that a reader of the run's chapters needs; one that several probes explain is explained once."""
    terms: dict[str, Term] = {}
    for _, known in door.parts("glossary"):
        for term in known:
            if set(term.tables) & set(run.tables) or (run.models and not term.tables):
                terms.setdefault(term.word, term)
    return [*terms.values()]


def overviews(run: Run) -> list[Overview]:
    """What the terminal shows of the run, probe by probe."""
    return [overview for _, overview in door.answers("overview", run) if overview is not None]


def next_steps(run: Run) -> list[str]:
    """What to do with what was made, a line each."""
    return [line for _, lines in door.answers("next_steps", run) for line in lines]


def _drawn(probe: Probe, group: Group) -> Iterator[Any]:
    """The charts of a group, each drawn when it is reached; none after one that fails, which is told."""
    return _one_by_one(probe, "charts", lambda: group.charts)


def _one_by_one(probe: Probe, kind: Kind, ask: Callable[..., Iterable[Any]], *arguments: object) -> Iterator[Any]:
    """What that part of a probe answers, each when it is reached; none after one that fails, which is told."""

    def answers() -> Iterator[Any]:
        yield from ask(*arguments)

    each = answers()
    try:
        while (part := door.call(probe, kind, next, each, None)) is not None:
            yield part
    except BrokenProbe as reason:
        door.tell(reason)


def _asked(probe: Probe, kind: Kind, *arguments: object) -> Any:
    """What that part of one probe answers, None without one; iterators as lists. Raises BrokenProbe where it fails."""
    ask = door.part(probe, kind)
    return None if ask is None else door.call(probe, kind, ask, *arguments)


def not_shown(run: Run) -> list[str]:
    """What of the runs that are read as one is not shown, a sentence a table."""
    return [
        f"{rows:,} rows of table {name} are not shown: another of these runs has rows of the same key."
        for name, rows in run.dropped.items()
    ]
