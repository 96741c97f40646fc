"""Overview of a run: its models, the roles of their heads, and all findings."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dashboards.run_store import current_store
from dashboards.view_state import Query, ViewState, build_url
from headscope.rendering import assembly, run_results
from headscope.rendering import html_page as report
from headscope.rendering.blocks import Block, LazySequence, Link, Links, PageContent, TextBlock, TextTable
from headscope.rendering.text import statistics_table
from headscope.results.collection import all_results
from headscope.results.words import count_nouns
from headscope.runs import summary
from headscope.runs.column_metadata import capitalise, heads_with_role, is_role_measured, leading_heads, roles
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import default_models

NAME = "Overview"
PATH = "/"


def controls(run: Run) -> Sequence[str]:
    """The models shown, if there are several."""
    return ("models",) if len(run.models) > 1 and len(run.heads) else ()


def missing_command(run: Run) -> str:
    """Empty: every run has this page."""
    return ""


def content(run: Run, view: ViewState) -> PageContent:
    """Cards, charts of every model, headlines, roles of heads, the models, claims, and all results, folded."""
    context = assembly.render_context(run, view.model, None, view.shown_models)
    sections: dict[str, Sequence[Block]] = {
        "": LazySequence(assembly.overview_cards(context)),
        "At a glance": LazySequence(assembly.overview_blocks(context)),
        "In short": LazySequence(_summary(run)),
        "Roles of heads": LazySequence(_role_table(run, view)) if len(run.heads) else [],
        "Models": LazySequence(_model_table(run, view)) if run.models else [],
        "Claims of the paper": LazySequence(_claims(run)),
        "In words": LazySequence(_sentences(run)),
        "Runs in this folder": [_runs_link(view)],
        "Run details": [
            TextTable(facts.pop("Run"), ("entry", "value"), [*facts.items()]) for facts in map(_provenance, run.parts)
        ],
    }
    count = len(run.models)
    if not run.models:
        return PageContent("Probes", "", sections)
    names = default_models(run)
    title = f"{count} model{'s' if count != 1 else ''}" + (f": {', '.join(names)}" if len(names) == count else "")
    note = f"Differences are against {run.models[0]}, paired by document." if count > 1 else ""
    return PageContent(title, note, sections)


def _summary(run: Run) -> Iterator[Block]:
    """Warnings and headlines. Results take seconds in a large run, so that the cards are sent before."""
    yield from run_results.summary_blocks(run)


def _claims(run: Run) -> Iterator[Block]:
    if claims := run_results.claim_table(all_results(run)):
        yield claims


def _sentences(run: Run) -> Iterator[Block]:
    for topic, sentences in run_results.sentences_by_topic(all_results(run)).items():
        yield TextBlock(sentences, topic, collapsed=True)


def _role_table(run: Run, view: ViewState) -> Iterator[TextTable]:
    """The number of heads with each role under each model, and links to the leading ones."""
    rows: list[list[str | Link | Links]] = []
    for name in roles():
        cells: list[str | Link | Links] = []
        for model in view.shown_models:
            heads = run.heads[run.heads["model"] == model]
            count = int(heads_with_role(heads, name).sum())
            top = leading_heads(heads, name)[["layer", "head"]].itertuples(index=False, name=None)
            links = [Link(f"L{layer}H{head}", view.link(f"/head/{layer}.{head}", model=model)) for layer, head in top]
            address = build_url("/heads", {**_run_query(view), "model": model, "role": name})
            all_heads = Link(count_nouns(count, "heads"), address)
            cells.append(
                Links([all_heads, *links]) if count else "none" if is_role_measured(heads, name) else "not measured"
            )
        if any(isinstance(cell, Links) for cell in cells):
            rows.append([name, *cells])
    definitions = {name: capitalise(role.meaning) for name, role in roles().items()}
    if rows:
        caption = "Number of heads with each role under each model, and the leading ones"
        yield TextTable(caption, ("role", *view.shown_models), rows, definitions)


def _run_query(view: ViewState) -> Query:
    return {"run": view.query["run"]}


def _model_table(run: Run, view: ViewState) -> Iterator[TextTable]:
    models = run.derived(summary.model_table)
    models = models[models["model"].isin(view.shown_models)]
    has_statistics = len(models.columns) > 1
    caption = "Medians over heads, and loss; 95 % confidence intervals in brackets" if has_statistics else "Models"
    specs = {
        model["label"]: f"{model['spec']}: {_describe_geometry(model['geometry'])}" for model in run.manifest["models"]
    }
    yield replace(statistics_table(caption, models), definitions=specs)


def _provenance(run: RunTables) -> dict[str, str]:
    return report.provenance(run) | {"Configuration": "in run.json; headscope run accepts this file as a study"}


def _runs_link(view: ViewState) -> Links:
    listing, unfinished = current_store().list_runs(), current_store().unfinished_jobs()
    damaged = sum(not isinstance(run, Run) for run in listing.values())
    text = f"{len(listing)} run{'s' if len(listing) != 1 else ''}" + (f", {damaged} damaged" if damaged else "")
    return Links([Link(text + (f"; {len(unfinished)} unfinished" if unfinished else ""), view.link("/runs"))])


def _describe_geometry(geometry: dict[str, Any]) -> str:
    if "layer_heads" in geometry or "layer_kv_groups" in geometry:  # layers differ
        return f"{geometry['layers']} layers with up to {geometry['heads']} heads in {geometry['kv_groups']} KV groups"
    return f"{geometry['layers']} layers, {geometry['heads']} heads in {geometry['kv_groups']} KV groups each"
