"""One head in full: findings and charts of the probes, its statistics under every model, and its KV group."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import pandas as pd

from dashboards.empty_pages import MAX_OFFERED_RUNS, command_for_run
from dashboards.pages.heads import PATH as HEADS_PATH
from dashboards.run_store import current_store, run_label
from dashboards.tabs import tab_name
from dashboards.view_state import ViewState, describe_statistic, parse_head, roles_of_run
from headscope.plots import role_emergence
from headscope.rendering import assembly, similar_heads
from headscope.rendering.blocks import Block, Chart, LazySequence, Link, Links, PageContent, TextBlock, TextTable
from headscope.rendering.explorer_blocks import Badges, KeyLinks, query_link
from headscope.rendering.text import column_heading, format_cell, head_mask
from headscope.results.words import count_nouns
from headscope.runs.aggregation import group_members
from headscope.runs.column_metadata import capitalise, parse_column, roles, statistic
from headscope.runs.head_profiles import head_roles
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with, longest_ess_column_of
from headscope.runs.trainings import training_checkpoints

NAME = "Head"
PATH = "/head"
NEIGHBOURS = {
    "Previous layer": ("ArrowDown", -1, 0),
    "Previous head": ("ArrowLeft", 0, -1),
    "Next head": ("ArrowRight", 0, 1),
    "Next layer": ("ArrowUp", 1, 0),
}
"""Keyboard shortcut and steps in layer and head, by link."""
MAX_REASONS = 2
"""Reasons why a head is notable in the introduction of its page."""


def controls(run: Run) -> Sequence[str]:
    """The model, if the run has statistics of heads."""
    return ("model",) if len(run.heads) else ()


def missing_command(run: Run) -> str:
    """The command that measures heads; "" if the run has heads."""
    return "" if len(run.heads) else command_for_run("headscope run", run)


def content(run: Run, view: ViewState, identifier: str = "") -> PageContent:
    """The head with this identifier, such as 3.2; by default the first notable head."""
    notable_heads = run.derived(assembly.notable_heads_of_run)
    layer, head = parse_head(identifier, run) if identifier else next(iter(notable_heads), (0, 0))
    rows = run.heads[head_mask(run.heads, layer, head)]
    group = int(rows["kv_group"].iloc[0]) if len(rows) else 0
    sections: dict[str, Sequence[Block]] = {
        "": LazySequence(_card(run, view, layer, head)),
        "Behaviour": LazySequence(_behaviour(run, view.model, layer, head)),
        **_explorers(run, view, layer, head),
        "During training": LazySequence(_training_charts(run, layer, head)),
        "Heads like this one": LazySequence(
            chain(
                assembly.similar_head_blocks(run, view.model, layer, head),
                similar_heads.nearest_profiles(run, view.model, layer, head),
                similar_heads.components_chart(run, view.model, (layer, head)),
            )
        ),
        "In words": LazySequence(_findings(run, view.model, layer, head), is_filled=True),
        "Statistics": LazySequence(_statistics_table(rows, default_models_with(run, view.model)), is_filled=True),
        f"Heads of KV group {group}": LazySequence(_kv_group_table(run, view, layer, group), is_filled=True),
    }
    reason = _shorten_reasons(notable_heads.get((layer, head), ""))
    role = assembly.head_roles_sentence(run, view.model, layer, head)
    introduction = " ".join(filter(None, [role, f"KV group {group}.", reason and f"Notable: {reason}."]))
    return PageContent(f"Layer {layer}, head {head}", introduction, sections, tabs=True)


def _shorten_reasons(reasons: str) -> str:
    """The first reasons why a head is notable, and the number of the others."""
    first, others = reasons.split("; ")[:MAX_REASONS], reasons.split("; ")[MAX_REASONS:]
    return "; ".join(first) + (f"; and in {count_nouns(len(others), 'other ways')}" if others else "")


def _card(run: Run, view: ViewState, layer: int, head: int) -> Iterator[Block]:
    """The roles as badges, and links to the neighbours."""
    if assigned_roles := head_roles(run, view.model, layer, head):
        yield Badges(
            [
                Link(
                    f"{role.name} {statistic(role.statistic_name).format_number(role.value)}",
                    query_link(HEADS_PATH, role=role.name),
                )
                for role in assigned_roles
            ],
            [
                f"{capitalise(roles()[role.name].meaning)}. {capitalise(statistic(role.statistic_name).label)}, "
                f"{role.rank_text}."
                for role in assigned_roles
            ],
        )
    yield _neighbour_links(run, view, layer, head)


def _behaviour(run: Run, model: str, layer: int, head: int) -> Iterator[Block]:
    """What the probes show first, then their other blocks with folded tables."""
    yield from assembly.head_card(run, model, layer, head)
    for block in assembly.head_blocks(run, model, layer, head):
        yield replace(block, collapsed=True) if isinstance(block, TextTable) else block


def _explorers(run: Run, view: ViewState, layer: int, head: int) -> dict[str, Sequence[Block]]:
    """What the probes show of the head in the state of the URL; without the data, the runs that have it."""
    query = {name: value for name, value in view.query.items() if isinstance(value, str)}
    sections: dict[str, Sequence[Block]] = {}
    for probe, blocks in assembly.head_explorers(run, view.model, layer, head, query):
        heading = probe.head_explorer_heading
        if probe.head_explorer_table in run.tables:
            sections[heading] = LazySequence(blocks)
        elif links := [*islice(_runs_with_table(probe.head_explorer_table, layer, head, heading), MAX_OFFERED_RUNS)]:
            reason = "This run does not store it. Other runs of this folder do:"
            sections[heading] = [TextBlock([reason], links=Links(links))]
    return sections


def _runs_with_table(table_name: str, layer: int, head: int, heading: str) -> Iterator[Link]:
    for name, run in current_store().list_runs().items():
        if isinstance(run, Run) and table_name in run.tables and (layer, head) in run.derived(_head_identifiers):
            yield Link(f"Open {run_label(name)}", query_link(f"/head/{layer}.{head}", run=name, tab=tab_name(heading)))


def _head_identifiers(run: Run) -> frozenset[tuple[int, int]]:
    """Layer and number of every head of the run's models; reads run.json only."""
    heads = group_members(run.manifest["models"])
    return frozenset(zip(heads["layer"].tolist(), heads["member"].tolist(), strict=True))


def _training_charts(run: Run, layer: int, head: int) -> Iterator[Chart]:
    """The scores of the head by training step, for a run over checkpoints."""
    training_steps = run.derived(_training_steps)
    if training_steps["step"].nunique() > 1:
        scored = [roles()[name] for name in roles_of_run(run) if roles()[name].threshold is not None]
        names = [*dict.fromkeys(role.order_by for role in scored)]
        yield Chart(
            role_emergence.plot_head_during_training(run.heads, (layer, head), names, training_steps),
            "One panel per score of the head, one line per training run.",
        )


def _training_steps(run: Run) -> pd.DataFrame:
    return training_checkpoints(run.manifest["models"])


def _findings(run: Run, model: str, layer: int, head: int) -> Iterator[TextBlock]:
    sentences = chain(*assembly.head_sentences(run, model, layer, head))
    yield TextBlock([*sentences], "All findings about this head", collapsed=True)


def _statistics_table(heads: pd.DataFrame, models: Sequence[str]) -> Iterator[TextTable]:
    of_models = heads[heads["model"].isin(models)]
    row_by_model = {str(row["model"]): row for row in of_models.to_dict("records")}
    names = assembly.measured_statistics(heads)
    rows = [
        [
            column_heading(name),
            *(format_cell(row_by_model[model], name) if model in row_by_model else "–" for model in models),
        ]
        for name in names
    ]
    definitions = {column_heading(name): describe_statistic(name) for name in names}
    caption = "Every statistic under each model; 95 % confidence intervals in brackets"
    yield TextTable(caption, ("statistic", *models), rows, definitions, collapsed=True)


def _kv_group_table(run: Run, view: ViewState, layer: int, kv_group: int) -> Iterator[TextTable]:
    """Statistics with a confidence interval of the heads of one KV group."""
    heads = run.heads[(run.heads["model"] == view.model) & (run.heads["layer"] == layer)]
    longest_name = longest_ess_column_of(run)
    names = [
        name
        for name in assembly.measured_statistics(heads)
        if f"{name}_low" in heads and (name == longest_name or parse_column(name).length is None)
    ]
    rows: list[list[str | Link | Links]] = [
        [
            Link(f"head {row['head']}", view.head_link(layer, int(row["head"]))),
            *(format_cell(row, name) for name in names),
        ]
        for row in heads[heads["kv_group"] == kv_group].to_dict("records")
    ]
    columns = ("head", *(statistic(name).label_with_unit for name in names))
    yield TextTable(f"The heads of this KV group under {view.model}", columns, rows, collapsed=True)


def _neighbour_links(run: Run, view: ViewState, layer: int, head: int) -> KeyLinks:
    """Links that keep the tab, and what is chosen in it, such as a trial."""
    kept = {name: value for name, value in view.query.items() if name in ("tab", "trial", "step")}
    heads = set(run.heads[["layer", "head"]].itertuples(index=False, name=None))
    neighbours = {
        key: Link(name, query_link(f"/head/{layer + layer_step}.{head + head_step}", **kept))
        for name, (key, layer_step, head_step) in NEIGHBOURS.items()
        if (layer + layer_step, head + head_step) in heads
    }
    return KeyLinks([*neighbours.values()], [*neighbours])
