"""What was run, the models side by side, and what was found, in words."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dashboards.run_store import current_store
from dashboards.view_state import Query, ViewState, build_url
from headscope.report import assembly
from headscope.report import html_page as report
from headscope.report.blocks import Block, LazySequence, Link, Links, PageContent, PaperClaim, TextBlock, TextTable
from headscope.report.text import default_models, statistics_table
from headscope.runs import summary
from headscope.runs.column_metadata import sentence
from headscope.runs.roles import holding, leading, roles
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables

NAME = "Overview"
PATH = "/"


def controls(run: Run) -> Sequence[str]:
    """Which models are drawn, where there are several."""
    return ("models",) if len(run.models) > 1 and len(run.heads) else ()


def content(run: Run, view: ViewState) -> PageContent:
    """Every model at a glance, who leads in each role, models side by side, and all that was found, folded."""
    sections: dict[str, Sequence[Block]] = {
        "At a glance": LazySequence(
            assembly.overview_blocks(assembly.render_context(run, view.model, None, view.shown_models))
        ),
        "Who does what": LazySequence(_role_table(run, view)) if len(run.heads) else [],
        "Models side by side": LazySequence(_model_table(run, view)) if run.models else [],
        "Comparison with the paper": LazySequence(_claim_table(run)),
        "What was found": LazySequence(_finding_blocks(run)),
        "Runs in this folder": [_runs_link(view)],
        "How it was made": [
            TextTable(facts.pop("Run"), ("", ""), [*facts.items()]) for facts in map(_provenance, run.parts)
        ],
    }
    count, tables = len(run.models), f"Tables: {', '.join(run.tables)}."
    return PageContent(
        f"{count} model{'s' if count != 1 else ''}: {', '.join(default_models(run))}" if run.models else "Probes",
        f"{tables} Differences are against {run.models[0]}, paired by document." if run.models else tables,
        sections,
    )


def _role_table(run: Run, view: ViewState) -> Iterator[TextTable]:
    """How many heads bear each role under each model, and who leads in it, as links."""
    rows: list[list[str | Link | Links]] = []
    for role, declared in roles().items():
        cells: list[str | Link | Links] = []
        for model in view.shown_models:
            mine = run.heads[run.heads["model"] == model]
            count = int(holding(mine, role).sum())
            places = leading(mine, role)[["layer", "head"]].itertuples(index=False, name=None)
            links = [Link(f"L{at}H{head}", view.link(f"/head/{at}.{head}", model=model)) for at, head in places]
            every = Link(f"{count} heads", build_url("/heads", {**_run_query(view), "model": model, "role": role}))
            known = not declared.by or (declared.by in mine and mine[declared.by].notna().any())
            cells.append(Links([every, *links]) if count else "none" if known else "not measured")
        if any(isinstance(cell, Links) for cell in cells):
            rows.append([role, *cells])
    meanings = {role: sentence(declared.meaning) for role, declared in roles().items()}
    if rows:
        title = "How many heads of each model bear a role, and who leads in it"
        yield TextTable(title, ("role", *view.shown_models), rows, meanings)


def _run_query(view: ViewState) -> Query:
    return {"run": view.query["run"]}


def _claim_table(run: Run) -> Iterator[TextTable]:
    """What the paper says, and whether the runs bear it out."""
    claims = [
        found for told in assembly.findings_by_topic(run).values() for found in told if isinstance(found, PaperClaim)
    ]
    rows = [(claim.statement, claim.verdict, claim.evidence) for claim in claims]
    if rows:
        yield TextTable("What the paper says, and what these runs say to that", ("the paper", "here", "found"), rows)


def _finding_blocks(run: Run) -> Iterator[TextBlock]:
    """All else that was found, folded under its topics."""
    for topic, told in assembly.findings_by_topic(run).items():
        if sentences := [found.text for found in told if not isinstance(found, PaperClaim)]:
            yield TextBlock(sentences, topic, collapsed=True)


def _model_table(run: Run, view: ViewState) -> Iterator[TextTable]:
    known = run.derived(summary.models)
    known = known[known["model"].isin(view.shown_models)]
    measured = len(known.columns) > 1
    title = "Medians over heads, and loss; 95 % intervals in brackets" if measured else "What they are"
    table = statistics_table(title, known)
    specs = {
        model["label"]: f"{model['spec']}: {_describe_geometry(model['geometry'])}" for model in run.manifest["models"]
    }
    yield replace(table, definitions=specs)


def _provenance(run: RunTables) -> dict[str, str]:
    return report.provenance(run) | {"Configuration": "stored in run.json; headscope run takes it back"}


def _runs_link(view: ViewState) -> Links:
    listing, waiting = current_store().list_runs(), current_store().unfinished_cells()
    broken = sum(not isinstance(found, Run) for found in listing.values())
    told = f"{len(listing)} run{'s' if len(listing) != 1 else ''}" + (f", {broken} of them damaged" if broken else "")
    return Links([Link(told + (f"; {len(waiting)} unfinished" if waiting else ""), view.link("/runs"))])


def _describe_geometry(geometry: dict[str, int]) -> str:
    return f"{geometry['layers']} layers of {geometry['heads']} heads in {geometry['kv_groups']} key groups"
