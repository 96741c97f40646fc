"""Contents of a report or page, in order: findings and charts of every probe, and the notable heads of a run.

This module calls probes only through `base.plugins` and names none. Charts are drawn lazily. If a probe fails, a
line in the place of its remaining charts says so, and the failure is logged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any, Concatenate, TypeVar

import pandas as pd

from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.base.heads import Head
from headscope.base.plugins import Arguments
from headscope.errors import BrokenProbe
from headscope.rendering.blocks import (
    Block,
    Chart,
    ChartGroup,
    LazySequence,
    Overview,
    PageContent,
    RenderContext,
    Term,
    TextBlock,
    TextTable,
)
from headscope.rendering.view_parts import ViewParts
from headscope.results.collection import ResultParts, all_results
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.results.words import join_words, sentence
from headscope.runs.column_metadata import (
    StatisticParts,
    columns_by_length,
    measured_roles,
    parse_column,
    statistic,
    statistics,
)
from headscope.runs.columns import TableParts
from headscope.runs.head_profiles import head_roles
from headscope.runs.run import Run
from headscope.runs.summary import (
    default_models,
    log_ratio_to_first,
    longest_ess_column,
)
from headscope.runs.trainings import training_checkpoints

Item = TypeVar("Item")

MAX_CARDS = 8
"""Maximum number of cards of an overview."""
MAX_PAGE_CARDS = 2
"""Maximum number of cards on top of another page."""
MAX_HEADS = 6
"""Maximum number of notable heads with charts of their own."""


def render_context(
    run: Run, selected_model: str = "", heads: pd.DataFrame | None = None, models: Sequence[str] | None = None
) -> RenderContext:
    """The data that charts of the run are drawn from.

    `selected_model` defaults to the first model. `heads` is the filtered per-head table, by default the whole one.
    `models` are the labels in the charts, in order, by default at most six; the first one is the baseline.
    """
    labels = default_models(run) if models is None else models
    all_heads = run.heads
    reasons = notable_heads(all_heads[all_heads["model"].isin(labels)])
    filtered_heads = all_heads if heads is None else heads
    return RenderContext(
        run,
        labels,
        filtered_heads[filtered_heads["model"].isin(labels)],
        selected_model or next(iter(labels), ""),
        dict(list(reasons.items())[:MAX_HEADS]),
    )


def notable_heads(heads: pd.DataFrame) -> dict[Head, str]:
    """Notable heads (layer, head), each with the reason: extremes in the first model and largest changes from it."""
    reasons: dict[Head, str] = {}
    for (layer, head), reason in _notable_reasons(heads) if len(heads) else ():
        index = int(layer), int(head)
        reasons[index] = f"{reasons[index]}; {reason}" if index in reasons else reason
    return reasons


def notable_heads_of_run(run: Run) -> dict[Head, str]:
    """Notable heads over all models of the run."""
    return notable_heads(run.heads)


def _notable_reasons(heads: pd.DataFrame) -> Iterator[tuple[Head, str]]:
    name, labels = longest_ess_column(heads), [*heads["model"].unique()]
    first = heads[heads["model"] == labels[0]].set_index(["layer", "head"])
    if name is not None:
        order = first[name].dropna().sort_values().index
        yield order[-1], "largest effective length"
        yield order[0], "smallest effective length"
        yield order[len(order) // 2], "median effective length"
    if "growth" in first and (growth := first["growth"].dropna()).size:
        yield growth.index[int(growth.argmax())], "highest growth exponent"
        yield growth.index[int(growth.argmin())], "lowest growth exponent"
    for column_name, stat in statistics().items():
        if stat.best_head_name and column_name in first and (values := first[column_name].dropna()).size:
            yield values.index[int(values.argmax())], f"highest {stat.label}"
    for label in labels[1:]:
        if name is not None and (change := log_ratio_to_first(heads, name, str(label))).size:
            yield change.index[int(change.abs().argmax())], f"largest change in effective length under {label}"


def measured_statistics(heads: pd.DataFrame) -> list[str]:
    """Columns of the per-head table that are statistics with a value; the longest context length comes first."""
    columns_by_stem: dict[str, list[str]] = {}
    for name in map(str, heads):
        columns_by_stem.setdefault(parse_column(name).stem, []).append(name)
    names = (
        name
        for stem in statistics()
        if (columns := columns_by_stem.get(stem))
        for name in ([stem] if stem in columns else reversed(columns_by_length(columns, stem)))
    )
    measured = {*heads.columns[heads.notna().any().to_numpy()]}
    return [name for name in names if name in measured]


def run_statistics(run: Run) -> list[str]:
    """Measured statistics of the run's heads, those of probes without a table of their own, as position parameters in
    every run, last; cached per run."""
    return run.derived(_compute_run_statistics)


def _compute_run_statistics(run: Run) -> list[str]:
    of_tables = {
        probe
        for probe, tables in plugins.call_parts(TableParts.tables)
        if any(table.name in run.tables for table in tables)
    }
    return sorted(measured_statistics(run.heads), key=lambda name: probe_for_statistic(name) not in of_tables)


def models_with_statistic(run: Run, statistic_name: str) -> list[str]:
    """Labels of the models with a value of the statistic, in the order of the run."""
    return [*run.derived(_models_with_statistic, statistic_name)]


def _models_with_statistic(run: Run, statistic_name: str) -> list[str]:
    if statistic_name not in run.heads:
        return []
    measured = {*run.heads.loc[run.heads[statistic_name].notna(), "model"]}
    return [label for label in run.models if label in measured]


def probe_for_statistic(statistic_name: str) -> Declaration | None:
    """The probe that declares the statistic, or None."""
    owners = (
        probe
        for probe, declared in plugins.call_parts(StatisticParts.statistics)
        if {statistic_name, parse_column(statistic_name).stem} & {*declared}
    )
    return next(owners, None)


def training_steps(run: Run) -> dict[str, int]:
    """Training step by model label, for the models that are checkpoints of a training run."""
    checkpoints = training_checkpoints(run.manifest["models"])
    return {str(label): int(step) for label, step in zip(checkpoints["label"], checkpoints["step"], strict=True)}


def results_by_topic(run: Run) -> dict[str, list[Result]]:
    """All results of a run by the heading under which they are shown."""
    return group_by_topic(all_results(run))


def group_by_topic(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results by the heading under which they are shown."""
    by_topic: dict[str, list[Result]] = {}
    for result in results:
        topic = questions()[result.question].topic
        by_topic.setdefault(topic, []).append(result)
    return by_topic


def collect_chapters(context: RenderContext, topic: str = "") -> dict[str, list[ChartGroup]]:
    """Chart groups by chapter, with drawn charts. Groups and chapters without charts are left out.

    With a `topic`, only groups whose chapter or heading contains it, ignoring case.
    """
    chapters: dict[str, list[ChartGroup]] = {}
    for _, group in drawn_groups(context, topic):
        chapters.setdefault(group.chapter, []).append(group)
    return chapters


def drawn_groups(context: RenderContext, topic: str = "") -> Iterator[tuple[Declaration, ChartGroup]]:
    """The groups of `collect_chapters` with their probes."""
    for probe, groups in plugins.call_parts(ViewParts.charts, context):
        for group in groups:
            if is_about(group, topic) and (charts := [*_iterate_charts(probe, group)]):
                yield probe, replace(group, charts=charts)


def is_about(group: ChartGroup, topic: str) -> bool:
    """Whether the chapter or the heading of the charts contains the topic, ignoring case."""
    return topic.casefold() in f"{group.chapter}\n{group.heading}".casefold()


def overview_blocks(context: RenderContext) -> Iterator[Block]:
    """The overview of a run: a small matrix of every model, and the charts of the probes for the app's first page."""
    if name := longest_ess_column(context.heads):
        from headscope.plots.head_matrices import plot_small_matrices

        yield Chart(
            plot_small_matrices(context.heads, name, context.scale_heads),
            "One cell per head, with the first layer at the bottom. All models share one colour scale.",
        )
    for charts in charts_for_page(context, "/").values():
        yield from charts


def overview_cards(context: RenderContext) -> Iterator[Block]:
    """The first cards of the probes for the overview, at most `MAX_CARDS`, created lazily."""
    cards = (
        card for probe in plugins.probes().values() for card in _iterate_part(probe, ViewParts.overview_cards, context)
    )
    yield from islice(cards, MAX_CARDS)


def probe_cards(context: RenderContext, probe: Declaration) -> Iterator[Block]:
    """The first cards of one probe for its own page, at most `MAX_PAGE_CARDS`, created lazily."""
    yield from islice(_iterate_part(probe, ViewParts.overview_cards, context), MAX_PAGE_CARDS)


def cards_for_page(context: RenderContext, page: str) -> Iterator[Block]:
    """Cards for a page of several probes, at most `MAX_PAGE_CARDS`, taking one from each probe in turn."""
    probes = [probe for probe in plugins.probes().values() if probe.has(ViewParts.page_cards)]
    parts = (_iterate_part(probe, ViewParts.page_cards, context, page) for probe in probes)
    yield from islice((card for cards in zip_longest(*parts) for card in cards if card is not None), MAX_PAGE_CARDS)


def charts_for_page(context: RenderContext, page: str) -> dict[str, Sequence[Block]]:
    """Blocks of the probes for a page of the app, by heading, drawn lazily."""
    iterators: dict[str, list[Iterator[Block]]] = {}
    for probe in plugins.probes().values():
        for group in _iterate_part(probe, ViewParts.charts, context):
            if isinstance(group, TextBlock):  # the probe fails
                iterators.setdefault("", []).append(iter([group]))
            elif page in group.app_pages.split():
                iterators.setdefault(group.heading or group.chapter, []).append(_iterate_charts(probe, group))
    return {heading: LazySequence(chain(*charts)) for heading, charts in iterators.items()}


def probe_charts(context: RenderContext, probe: Declaration) -> dict[str, Sequence[Block]]:
    """Blocks of one probe, by heading, drawn lazily. Raises BrokenProbe if the probe fails."""
    iterators: dict[str, list[Iterator[Block]]] = {}
    for group in plugins.call_part(probe, ViewParts.charts, context):
        iterators.setdefault(group.heading, []).append(_iterate_charts(probe, group))
    return {heading: LazySequence(chain(*charts)) for heading, charts in iterators.items()}


def probe_page(context: RenderContext, probe: Declaration) -> PageContent | None:
    """The probe's own page, or None without one. Raises BrokenProbe if the probe fails."""
    return plugins.call_part(probe, ViewParts.page, context)


def head_roles_sentence(run: Run, model: str, layer: int, head: int) -> str:
    """One sentence with the strongest role of a head under a model, and its other roles."""
    assigned_roles = head_roles(run, model, layer, head)
    if not assigned_roles:
        return f"None of the measured roles under {model}." if measured_roles(run.heads) else ""
    role, *weaker_roles = assigned_roles
    stat = statistic(role.statistic_name)
    also = f"; also {join_words([weaker.name for weaker in weaker_roles])}" if weaker_roles else ""
    return (
        f"Strongest role under {model}: {role.name} ({stat.label} {stat.format_number(role.value)}, "
        f"{role.rank_text}){also}."
    )


def head_sentences(run: Run, model: str, layer: int, head: int) -> tuple[list[str], list[str]]:
    """Sentences about the head in a model: the first sentence of every probe, and all further sentences."""
    by_probe = {
        probe.name: [sentence(result) for result in head_results]
        for probe, head_results in plugins.call_parts(ResultParts.head_results, run, model, layer, head)
    }
    sentences = [by_probe[name] for name in plugins.probes() if name in by_probe]
    return [texts[0] for texts in sentences if texts], [text for texts in sentences for text in texts[1:]]


def head_card(run: Run, model: str, layer: int, head: int) -> list[Block]:
    """Blocks of the probes for the top of a head's page: wide charts, then charts and tables of half the width."""
    blocks = [
        block
        for probe in plugins.probes().values()
        for block in _iterate_part(probe, ViewParts.head_card, run, model, layer, head)
    ]
    return sorted(
        blocks, key=lambda block: (not isinstance(block, Chart), isinstance(block, Chart) and block.half_width)
    )


def head_explorers(
    run: Run, model: str, layer: int, head: int, query: Mapping[str, str]
) -> Iterator[tuple[Declaration, Iterator[Block]]]:
    """The explorers of the probes about one head, for the probes that have one, with blocks created lazily."""
    for probe in plugins.probes().values():
        if probe.has(ViewParts.head_explorer):
            yield probe, _iterate_part(probe, ViewParts.head_explorer, run, model, layer, head, query)


def similar_head_blocks(run: Run, model: str, layer: int, head: int) -> Iterator[Block]:
    """Blocks of the probes that list the heads most similar to one, created lazily."""
    for probe in plugins.probes().values():
        yield from _iterate_part(probe, ViewParts.similar_heads, run, model, layer, head)


def row_blocks(run: Run, model: str, length: int, doc: str, layer: int, head: int, query: int) -> Iterator[Block]:
    """Blocks of the probes that explain the weights of one attention row, created lazily."""
    for probe in plugins.probes().values():
        yield from _iterate_part(probe, ViewParts.row_charts, run, model, length, doc, layer, head, query)


def head_blocks(run: Run, model: str, layer: int, head: int) -> Iterator[Block]:
    """Blocks of the probes about one head, created lazily: first texts and tables, then charts."""
    charts: list[Iterator[Block]] = []
    for probe in plugins.probes().values():
        blocks = _iterate_part(probe, ViewParts.head_charts, run, model, layer, head)
        for block in blocks:
            if isinstance(block, Chart):
                charts.append(chain([block], blocks))
                break
            yield block
    yield from chain(*charts)


def collect_glossary(run: Run) -> list[Term]:
    """Glossary terms for the chapters of the run; the first definition of a term wins."""
    terms: dict[str, Term] = {}
    for _, declared_terms in plugins.call_parts(ViewParts.glossary):
        for term in declared_terms:
            if set(term.tables) & set(run.tables) or (run.models and not term.tables):
                terms.setdefault(term.word, term)
    return [*terms.values()]


def collect_overviews(run: Run) -> list[Overview]:
    """The data of the probes for `--json`, one per probe that has some."""
    return [overview for _, overview in plugins.call_parts(ViewParts.overview, run) if overview is not None]


def collect_next_steps(run: Run) -> list[str]:
    """Suggested next steps, one line each."""
    return [line for _, lines in plugins.call_parts(ViewParts.next_steps, run) for line in lines]


def _iterate_charts(probe: Declaration, group: ChartGroup) -> Iterator[Chart | TextTable | TextBlock]:
    """The charts of a group, drawn lazily; if one fails, a line in its place says so and ends the group."""
    return _iterate(probe, "charts", lambda: group.charts)


def _iterate_part(
    probe: Declaration,
    part: Callable[Concatenate[Any, Arguments], Iterable[Item]],
    *arguments: Arguments.args,
    **keywords: Arguments.kwargs,
) -> Iterator[Item | TextBlock]:
    """The items that a part of a probe returns, created lazily; if one fails, a line in its place says so."""
    method = plugins.method_of(probe, part)
    return _iterate(probe, part.__name__, lambda: method(*arguments, **keywords))


def _iterate(probe: Declaration, part_name: str, items: Callable[[], Iterable[Item]]) -> Iterator[Item | TextBlock]:
    def lazily() -> Iterator[Item]:
        yield from items()

    iterator = lazily()
    try:
        while (item := plugins.call_guarded(probe, part_name, next, iterator, None)) is not None:
            yield item
    except BrokenProbe as error:
        plugins.report_broken(error)
        yield TextBlock([f"Not shown: {error}. The terminal that draws this page names the line that fails."])


def dropped_row_notes(run: Run) -> list[str]:
    """One sentence per table about the rows that combining the runs has dropped."""
    return [
        f"Table {name}: {rows:,} rows are left out, because another of the combined runs has rows with the same keys."
        for name, rows in run.conflicting_row_counts.items()
    ]
