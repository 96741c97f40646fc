"""What was run, the models side by side, and what was found, in words."""

from dashboards.content import Content, Link, Part, Table, Words
from dashboards.library import current
from dashboards.view import View
from headscope import findings, report, summary
from headscope.store import Run

NAME = "Overview"
PATH = "/"
CONTROLS = ()


def content(run: Run, view: View) -> Content:
    """Models with medians and paired differences, findings by topic, provenance, and the other runs of the folder."""
    told = findings.sentences(run)
    side = report.table_rows(summary.models(run)) if run.models else {"names": [], "rows": []}
    defined = {model["label"]: f"{model['spec']}: {_shape(model['geometry'])}" for model in run.manifest["models"]}
    models = Table("Medians over heads, and loss; 95 % intervals in brackets", side["names"], side["rows"], defined)
    facts = [Table(each.pop("Run"), ("", ""), [*each.items()]) for each in map(_facts, run.parts)]
    sections: dict[str, list[Part]] = {
        "Models side by side": [models],
        "What was found": [Words(sentences, topic) for topic, sentences in told.items()],
        "Runs in this folder": [_runs()],
        "How it was made": [*facts],
    }
    return Content(
        f"{len(run.models)} model{'s' if len(run.models) != 1 else ''}: {', '.join(findings.few(run.models))}",
        f"Tables: {', '.join(run.tables)}. Differences are against {run.models[0]}, paired by document."
        if run.models
        else f"Tables: {', '.join(run.tables)}.",
        sections,
    )


def _facts(run: Run) -> dict[str, str]:
    return report.facts(run) | {"Configuration": "stored in run.json; headscope run takes it back"}


def _runs() -> Table:
    rows: list[list[str | Link]] = []
    for name, found in current().listing().items():
        if isinstance(found, Run):
            rows.append([Link(name, f"/?run={name}"), ", ".join(findings.few(found.models)), ", ".join(found.tables)])
        else:
            rows.append([name, "cannot be read", str(found)])
    for name, cells in current().unfinished().items():
        rows.append([name, "unfinished", f"{cells} cells stored; the same command with --resume goes on"])
    return Table("Choose several at the left to read them as one", ("run", "models", "tables"), rows)


def _shape(geometry: dict[str, int]) -> str:
    return f"{geometry['layers']} layers of {geometry['heads']} heads in {geometry['kv_groups']} key groups"
