"""The runs of the folder: models, probes and size of each, and what to do with damaged and unfinished ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.run_notes import NotesBlock, ProgressBlock
from dashboards.run_store import current_store
from dashboards.view_state import ViewState, build_url
from headscope import plugins
from headscope.report.blocks import Block, PageContent, RecordTable, TextBlock, TextTable
from headscope.runs.notes import read_notes
from headscope.runs.run import Run, RunProgress, short_names
from headscope.runs.run_tables import RunTables

NAME = "Runs"
PATH = "/runs"


def controls(run: Run) -> Sequence[str]:
    """None: the table has its own filters."""
    return ()


def missing_command(run: Run) -> str:
    """Empty: every run has this page."""
    return ""


def content(run: Run, view: ViewState) -> PageContent:
    """All runs in a table, and the differences between the configurations of the combined runs."""
    store, rows = current_store(), [*run_records()]
    sections: dict[str, list[Block]] = {"": [RecordTable("Runs of this folder", rows)]}
    if damaged := [f"{row['run']}: {row['state']}" for row in rows if row["state"].startswith("cannot")]:
        sections["Damaged runs"] = [TextBlock(damaged)]
    if progress := store.progress():
        hint = "Repeat the command of an interrupted run with --resume to continue it."
        sections["Unfinished runs"] = [ProgressBlock([*map(describe_progress, progress)]), TextBlock([hint])]
    if not store.is_read_only:
        sections["Notes and tags"] = [NotesBlock([], run_names=[part.path.name for part in run.parts])]
    hint = "Add a second run to “Combined runs” to compare their configurations."
    sections["Differences between the combined runs"] = [
        _config_differences(run.parts) if len(run.parts) > 1 else TextBlock([hint])
    ]
    count, megabytes = len(rows), sum(row["MB"] or 0 for row in rows)
    introduction = f"{count} run{'s' if count != 1 else ''}, {megabytes:,.1f} MB in total. Click a run to open it."
    return PageContent("Runs", introduction, sections)


def describe_progress(progress: RunProgress) -> str:
    """The name of an unfinished run and what is stored of it."""
    return f"{progress.name}: {progress.describe()}."


def run_records() -> Iterator[dict[str, Any]]:
    """The rows of the table: finished, damaged and unfinished runs."""
    for name, run in current_store().list_runs().items():
        if isinstance(run, Run):
            manifest, notes = run.manifest, read_notes(run.path)
            yield {
                "run": name,
                "started": str(manifest.get("started", ""))[:16].replace("T", " "),
                "models": ", ".join(run.models),
                "tags": ", ".join(notes.tags),
                "note": notes.note,
                "probes": ", ".join(_probe_names(manifest)),
                "tables": ", ".join(run.tables),
                "rows": sum(table["rows"] for table in manifest["tables"].values()),
                "MB": round(sum(file.stat().st_size for file in run.path.glob("*.parquet")) / 1e6, 2),
                "minutes": round(manifest.get("timings", {}).get("seconds", 0) / 60, 1),
                "state": "finished",
                "href": build_url("/", {"run": name}),
            }
        else:
            yield _incomplete_record(name, f"cannot be read: {run}")
    for progress in current_store().progress():
        yield _incomplete_record(progress.name, "unfinished")


def _incomplete_record(name: str, state: str) -> dict[str, Any]:
    empty = dict.fromkeys(("started", "models", "tags", "note", "probes", "tables"), "") | dict.fromkeys(
        ("rows", "MB", "minutes")
    )
    return {"run": name, **empty, "state": state, "href": ""}


def _probe_names(manifest: Mapping[str, Any]) -> list[str]:
    config = manifest.get("config") or {}
    return [name for name in plugins.probes() if config.get(name)]


def _config_differences(runs: Sequence[RunTables]) -> TextTable:
    """Every configuration entry that differs between the runs."""
    configs = [dict(_flatten(run.manifest.get("config") or {})) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [
        (name, *(config.get(name, "–") for config in configs))
        for name in names
        if len({config.get(name) for config in configs}) > 1
    ]
    caption = f"Entries that differ: {len(rows)} of {len(names)}"
    return TextTable(caption, ("entry", *short_names([run.name for run in runs])), rows)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, nested in value.items():
            yield from _flatten(nested, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix, str(value)
