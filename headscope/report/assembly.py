"""What a report or a page is made of, in order: what every probe says of a run, and which heads to show.

Asks through the door and names no probe. Charts are drawn when they are asked for; those that cannot be drawn are told
of and left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pandas as pd

from headscope import plugins
from headscope.errors import BrokenProbe
from headscope.plots.heads import plot_small_matrices
from headscope.plots.highlight import HeadIndex
from headscope.plugins import Kind, Probe
from headscope.report.blocks import (
    Block,
    Chart,
    ChartGroup,
    Finding,
    LazySequence,
    Overview,
    PageContent,
    RenderContext,
    Term,
)
from headscope.report.text import default_models
from headscope.runs.column_metadata import by_length, column, statistics
from headscope.runs.run import Run
from headscope.runs.summary import longest, moved
from headscope.runs.training_runs import courses

MAX_HEADS = 6
"""Heads that are drawn one by one."""


def render_context(
    run: Run, selected_model: str = "", heads: pd.DataFrame | None = None, models: Sequence[str] | None = None
) -> RenderContext:
    """The run as charts are drawn from it: `model` in view (the first one), `heads` as a filter left them, `models`
    (few of them) in this order, the first being what others are compared with."""
    labels = default_models(run) if models is None else models
    every = run.heads
    chosen = notable_heads(every[every["model"].isin(labels)])
    kept = every if heads is None else heads
    return RenderContext(
        run,
        labels,
        kept[kept["model"].isin(labels)],
        selected_model or next(iter(labels), ""),
        dict(list(chosen.items())[:MAX_HEADS]),
    )


def notable_heads(heads: pd.DataFrame) -> dict[HeadIndex, str]:
    """Heads (layer, head) to show, each with the reason, judged by the first model and by change against it."""
    chosen: dict[HeadIndex, str] = {}
    for (layer, head), reason in _notable_reasons(heads) if len(heads) else ():
        place = int(layer), int(head)
        chosen[place] = f"{chosen[place]}; {reason}" if place in chosen else reason
    return chosen


def notable_heads_of_run(run: Run) -> dict[HeadIndex, str]:
    """`notable` of all models of the run."""
    return notable_heads(run.heads)


def _notable_reasons(heads: pd.DataFrame) -> Iterator[tuple[HeadIndex, str]]:
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


def measured_statistics(heads: pd.DataFrame) -> list[str]:
    """The statistics of the per-head table that have a number; of one by length the longest comes first."""
    columns = [*map(str, heads)]
    named = (
        name
        for stem in statistics()
        for name in ([stem] if stem in columns else reversed(by_length(columns, stem)))
        if heads[name].notna().any()
    )
    return [*named]


def run_statistics(run: Run) -> list[str]:
    """`measured` of the run's heads, found once."""
    return run.derived(_compute_run_statistics)


def _compute_run_statistics(run: Run) -> list[str]:
    return measured_statistics(run.heads)


def models_with_statistic(run: Run, statistic_name: str) -> list[str]:
    """The models that have a number in that column of the per-head table."""
    known = (
        run.heads.dropna(subset=[statistic_name])["model"].astype(str).unique() if statistic_name in run.heads else ()
    )
    return [label for label in run.models if label in known]


def probe_for_statistic(statistic_name: str) -> Probe | None:
    """The probe that measures that statistic."""
    found = (
        probe
        for probe, declared in plugins.load_parts("statistics")
        if {statistic_name, column(statistic_name).stem} & {*declared}
    )
    return next(found, None)


def training_steps(run: Run) -> dict[str, int]:
    """The training step of each model that is a checkpoint of a training."""
    course = courses(run.manifest["models"])
    return {str(label): int(step) for label, step in zip(course["label"], course["step"], strict=True)}


def findings_by_topic(run: Run) -> dict[str, list[Finding]]:
    """What every probe finds in the run, by topic."""
    return _group_by_topic(chain.from_iterable(run.derived(_findings_by_probe).values()))


def probe_findings(run: Run, probe: Probe) -> dict[str, list[Finding]]:
    """What one probe finds in the run, by topic."""
    return _group_by_topic(run.derived(_findings_by_probe).get(probe.name, ()))


def _findings_by_probe(run: Run) -> dict[str, list[Finding]]:
    """What each probe finds, by its name."""
    return {probe.name: [*found] for probe, found in plugins.call_parts("findings", run)}


def _group_by_topic(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    told: dict[str, list[Finding]] = {}
    for finding in findings:
        told.setdefault(finding.topic, []).append(finding)
    return told


def collect_chapters(context: RenderContext, topic: str = "") -> dict[str, list[ChartGroup]]:
    """What a report shows, by chapter, drawn; groups and chapters without charts are left out.

    With a `topic`, only groups that have it in the name of their chapter or in their heading.
    """
    told: dict[str, list[ChartGroup]] = {}
    for probe, groups in plugins.call_parts("charts", context):
        for group in groups:
            named = topic.casefold() in f"{group.chapter}\n{group.heading}".casefold()
            if named and (charts := [*_iterate_charts(probe, group)]):
                told.setdefault(group.chapter, []).append(replace(group, charts=charts))
    return told


def overview_blocks(context: RenderContext) -> Iterator[Block]:
    """What a run shows first: a small matrix of every model, and what the probes show on the first page of the app."""
    if name := longest(context.heads):
        yield Chart(
            plot_small_matrices(context.heads, name),
            "A cell is a head, the first layer at the bottom; one scale for all models.",
        )
    for charts in charts_for_page(context, "/").values():
        yield from charts


def charts_for_page(context: RenderContext, page: str) -> dict[str, Sequence[Block]]:
    """What the probes show on that page of the app, by heading, drawn when it is reached."""
    told: dict[str, list[Iterator[Block]]] = {}
    for probe, groups in plugins.call_parts("charts", context):
        for group in groups:
            if page in group.app_pages.split():
                told.setdefault(group.heading or group.chapter, []).append(_iterate_charts(probe, group))
    return {heading: LazySequence(chain(*charts)) for heading, charts in told.items()}


def probe_charts(context: RenderContext, probe: Probe) -> dict[str, Sequence[Block]]:
    """What one probe shows, by heading, drawn when it is reached. Raises BrokenProbe where it cannot."""
    told: dict[str, list[Iterator[Block]]] = {}
    for group in _call_part(probe, "charts", context) or ():
        told.setdefault(group.heading, []).append(_iterate_charts(probe, group))
    return {heading: LazySequence(chain(*charts)) for heading, charts in told.items()}


def probe_page(context: RenderContext, probe: Probe) -> PageContent | None:
    """The page that a probe draws itself, None where it draws none. Raises BrokenProbe where it cannot."""
    page: PageContent | None = _call_part(probe, "page", context)
    return page


def head_sentences(run: Run, model: str, layer: int, head: int) -> tuple[list[str], list[str]]:
    """What the head is in `model`: the first sentence of every probe, and what else they say."""
    told = [list(found) for _, found in plugins.call_parts("head_findings", run, model, layer, head)]
    return [found[0] for found in told if found], [sentence for found in told for sentence in found[1:]]


def head_blocks(run: Run, model: str, layer: int, head: int) -> Iterator[Block]:
    """What the probes show of one head, made when it is reached: what they tell in words and tables, then charts."""
    charts: list[Iterator[Block]] = []
    for probe, ask in plugins.load_parts("head_charts"):
        parts = _iterate_part(probe, "head_charts", ask, run, model, layer, head)
        for part in parts:
            if isinstance(part, Chart):
                charts.append(chain([part], parts))
                break
            yield part
    yield from chain(*charts)


def collect_glossary(run: Run) -> list[Term]:
    """The words that a reader of the run's chapters needs; one that several probes explain is explained once."""
    terms: dict[str, Term] = {}
    for _, known in plugins.load_parts("glossary"):
        for term in known:
            if set(term.tables) & set(run.tables) or (run.models and not term.tables):
                terms.setdefault(term.word, term)
    return [*terms.values()]


def collect_overviews(run: Run) -> list[Overview]:
    """What the terminal shows of the run, probe by probe."""
    return [overview for _, overview in plugins.call_parts("overview", run) if overview is not None]


def collect_next_steps(run: Run) -> list[str]:
    """What to do with what was made, a line each."""
    return [line for _, lines in plugins.call_parts("next_steps", run) for line in lines]


def _iterate_charts(probe: Probe, group: ChartGroup) -> Iterator[Any]:
    """The charts of a group, each drawn when it is reached; none after one that fails, which is told."""
    return _iterate_part(probe, "charts", lambda: group.charts)


def _iterate_part(
    probe: Probe, kind: Kind, part_function: Callable[..., Iterable[Any]], *arguments: object
) -> Iterator[Any]:
    """What that part of a probe answers, each when it is reached; none after one that fails, which is told."""

    def answers() -> Iterator[Any]:
        yield from part_function(*arguments)

    each = answers()
    try:
        while (part := plugins.call_part(probe, kind, next, each, None)) is not None:
            yield part
    except BrokenProbe as reason:
        plugins.report_broken(reason)


def _call_part(probe: Probe, kind: Kind, *arguments: object) -> Any:
    """What that part of one probe answers, None without one; iterators as lists. Raises BrokenProbe where it fails."""
    ask = plugins.load_part(probe, kind)
    return None if ask is None else plugins.call_part(probe, kind, ask, *arguments)


def dropped_row_notes(run: Run) -> list[str]:
    """What of the runs that are read as one is not shown, a sentence a table."""
    return [
        f"{rows:,} rows of table {name} are not shown: another of these runs has rows of the same key."
        for name, rows in run.dropped.items()
    ]
