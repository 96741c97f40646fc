"""What was run, the models side by side, and what was found, in words."""

from dataclasses import replace

from dashboards.library import current
from dashboards.view import View
from headscope.report import cells, outline
from headscope.report import html as report
from headscope.report.content import Content, Link, Listing, Piece, Words
from headscope.report.words import few
from headscope.runs import summary
from headscope.runs.run import Run
from headscope.runs.stored import Stored

NAME = "Overview"
PATH = "/"
CONTROLS = ()


def content(run: Run, view: View) -> Content:
    """Models with medians and paired differences, findings by topic, provenance, and the other runs of the folder."""
    found = outline.findings(run).items()
    sections: dict[str, list[Piece]] = {
        "Models side by side": [_side_by_side(run)] if run.models else [],
        "What was found": [Words([finding.text for finding in told], topic) for topic, told in found],
        "Runs in this folder": [_runs()],
        "How it was made": [Listing(facts.pop("Run"), ("", ""), [*facts.items()]) for facts in map(_facts, run.parts)],
    }
    count, tables = len(run.models), f"Tables: {', '.join(run.tables)}."
    return Content(
        f"{count} model{'s' if count != 1 else ''}: {', '.join(few(run.models))}" if run.models else "Probes",
        f"{tables} Differences are against {run.models[0]}, paired by document." if run.models else tables,
        {heading: parts for heading, parts in sections.items() if parts},
    )


def _side_by_side(run: Run) -> Listing:
    table = cells.table("Medians over heads, and loss; 95 % intervals in brackets", summary.models(run))
    specs = {model["label"]: f"{model['spec']}: {_shape(model['geometry'])}" for model in run.manifest["models"]}
    return replace(table, defined=specs)


def _facts(run: Stored) -> dict[str, str]:
    return report.facts(run) | {"Configuration": "stored in run.json; headscope run takes it back"}


def _runs() -> Listing:
    rows: list[list[str | Link]] = []
    for name, found in current().listing().items():
        if isinstance(found, Run):
            rows.append([Link(name, f"/?run={name}"), ", ".join(few(found.models)), ", ".join(found.tables)])
        else:
            rows.append([name, "cannot be read", str(found)])
    for name, stored in current().unfinished().items():
        rows.append([name, "unfinished", f"{stored} cells stored; the same command with --resume goes on"])
    return Listing("Choose several at the left to read them as one", ("run", "models", "tables"), rows)


def _shape(geometry: dict[str, int]) -> str:
    return f"{geometry['layers']} layers of {geometry['heads']} heads in {geometry['kv_groups']} key groups"
