"""The runs of the folder: what each measured, how large it is, what to do with one that is damaged or unfinished."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.run_store import current_store
from dashboards.view_state import ViewState, build_url
from headscope import plugins
from headscope.report.blocks import Block, PageContent, RecordTable, TextBlock, TextTable
from headscope.runs.run import Run, short_names
from headscope.runs.run_tables import RunTables

NAME = "Runs"
PATH = "/runs"


def controls(run: Run) -> Sequence[str]:
    """None: the table has its own."""
    return ()


def content(run: Run, view: ViewState) -> PageContent:
    """All runs in a table to sort and to search; of the chosen ones, where their configurations differ."""
    rows = [*_run_records()]
    sections: dict[str, list[Block]] = {"": [RecordTable("Runs of this folder", rows)]}
    if broken := [f"{row['run']}: {row['state']}" for row in rows if row["state"] != "finished"]:
        sections["Damaged and unfinished"] = [TextBlock(broken)]
    how = "Choose a second run at the left to see where their configurations differ."
    sections["How the chosen runs differ"] = [
        _config_differences(run.parts) if len(run.parts) > 1 else TextBlock([how])
    ]
    megabytes = sum(row["MB"] or 0 for row in rows)
    return PageContent(
        "Runs",
        f"{len(rows)} run{'s' if len(rows) != 1 else ''}, {megabytes:,.1f} MB in all. A click opens one.",
        sections,
    )


def _run_records() -> Iterator[dict[str, Any]]:
    for name, found in current_store().list_runs().items():
        if isinstance(found, Run):
            told = found.manifest
            yield {
                "run": name,
                "started": str(told.get("started", ""))[:16].replace("T", " "),
                "models": ", ".join(found.models),
                "sections": ", ".join(_probe_names(told)),
                "tables": ", ".join(found.tables),
                "rows": sum(table["rows"] for table in told["tables"].values()),
                "MB": round(sum(file.stat().st_size for file in found.path.glob("*.parquet")) / 1e6, 2),
                "minutes": round(told.get("timings", {}).get("seconds", 0) / 60, 1),
                "state": "finished",
                "href": build_url("/", {"run": name}),
            }
        else:
            yield _incomplete_record(name, f"cannot be read: {found}")
    for name, stored in current_store().unfinished_cells().items():
        yield _incomplete_record(
            name, f"unfinished, with {stored} cells stored: the same command with --resume goes on"
        )


def _incomplete_record(name: str, state: str) -> dict[str, Any]:
    nothing = dict.fromkeys(("started", "models", "sections", "tables"), "") | dict.fromkeys(("rows", "MB", "minutes"))
    return {"run": name, **nothing, "state": state, "href": ""}


def _probe_names(manifest: Mapping[str, Any]) -> list[str]:
    config = manifest.get("config") or {}
    return [name for name in plugins.requestable_probes() if config.get(name)]


def _config_differences(runs: Sequence[RunTables]) -> TextTable:
    """Every entry of the configurations that is not the same in all runs."""
    flat = [dict(_flatten(run.manifest.get("config") or {})) for run in runs]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = [
        (name, *(each.get(name, "–") for each in flat)) for name in names if len({each.get(name) for each in flat}) > 1
    ]
    told = f"Where the configurations differ: {len(rows)} of {len(names)} entries"
    return TextTable(told, ("entry", *short_names([run.name for run in runs])), rows)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix, str(value)
