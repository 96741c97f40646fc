"""The runs of the folder: models, probes and size of each, and what to do with damaged and unfinished ones."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dashboards.run_notes import NotesBlock, ProgressBlock
from dashboards.run_store import current_store, run_label
from dashboards.view_state import ViewState, build_url
from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.plots import axes, shapes, style
from headscope.rendering.blocks import Block, Chart, LazySequence, PageContent, RecordTable, TextBlock, TextTable
from headscope.rendering.comparison import comparison_tables
from headscope.rendering.explorer_blocks import query_link
from headscope.results.comparison import compare, in_order_of_time
from headscope.runs.columns import TableParts
from headscope.runs.notes import read_notes
from headscope.runs.run import Run, RunProgress, short_names
from headscope.runs.run_tables import RunTables

NAME = "Runs"
PATH = "/runs"
MAX_CHART_RUNS = 20
"""Runs in the chart, the newest."""


def controls(run: Run) -> Sequence[str]:
    """None: the table has its own filters."""
    return ()


def missing_command(run: Run) -> str:
    """Empty: every run has this page."""
    return ""


def content(run: Run, view: ViewState) -> PageContent:
    """All runs in a table, and the differences between the configurations of the combined runs."""
    store, rows = current_store(), [*run_records()]
    charts = [_coverage_chart(finished)] if (finished := _newest_finished_runs()) else []
    sections: dict[str, Sequence[Block]] = {"": [*charts, RecordTable("Runs of this folder", rows)]}
    if damaged := [f"{row['run']}: {row['state']}" for row in rows if row["state"].startswith("cannot")]:
        sections["Damaged runs"] = [TextBlock(damaged)]
    hint = "Repeat the command of an interrupted run with --resume to continue it."
    progress = ProgressBlock([*map(describe_progress, store.progress())])
    sections["Unfinished runs"] = [progress, TextBlock([hint])]
    if not store.is_read_only:
        sections["Notes and tags"] = [NotesBlock([], run_names=[part.path.name for part in run.parts])]
    hint = "Add a second run to “Combined runs” to compare their results and configurations."
    sections["Differences between the combined runs"] = [
        _config_differences(run.parts) if len(run.parts) > 1 else TextBlock([hint])
    ]
    if len(run.parts) == 2:
        earlier, later = in_order_of_time(Run.open(part.path) for part in run.parts)
        heading = f"Changes from {run_label(earlier.name)} to {run_label(later.name)}"
        sections[heading] = LazySequence(_changes(earlier, later))
    count, megabytes = len(rows), sum(row["MB"] or 0 for row in rows)
    introduction = f"{count} run{'s' if count != 1 else ''}, {megabytes:,.1f} MB in total. Click a run to open it."
    return PageContent("Runs", introduction, sections)


def _newest_finished_runs() -> list[Run]:
    """The readable runs that the chart shows, newest first."""
    return [run for run in current_store().list_runs().values() if isinstance(run, Run)][:MAX_CHART_RUNS]


def _coverage_chart(runs: Sequence[Run]) -> Chart:
    """Which probes each run holds, by the number of stored rows; a cell opens the page of the probe."""
    stored = [{name: entry["rows"] for name, entry in run.manifest["tables"].items()} for run in runs]
    rows_by_probe = {
        probe: rows
        for probe, tables in plugins.call_parts(TableParts.tables)
        if not probe.runs_always
        and any(rows := [sum(tables_of_run.get(table.name, 0) for table in tables) for tables_of_run in stored])
    }
    labels = [probe.tab or probe.title for probe in rows_by_probe]
    counts = pd.DataFrame([*rows_by_probe.values()], labels, short_names([run.path.name for run in runs])).T
    measured = counts.where(counts > 0).astype("float64")
    figure = shapes.matrix(
        "What each run holds",
        measured.map(np.log10).rename(style.escape_label),
        "%{y}<br>%{x}: %{customdata[0]:,} rows",
        {"type": "category", "showgrid": False, "tickfont_size": 10, "tickangle": -35},
        {"type": "category", "autorange": "reversed", "showgrid": False, "dtick": 1},
        height=120 + 24 * len(runs),
        customdata=counts.to_numpy()[..., None],
        hoverongaps=False,
        colorbar={"title": {"text": "rows"}, **axes.log_colorbar(measured)},
    )
    style.set_metadata(figure, value="rows", value_index=0, x="probe", y="run")
    newest = f", the {len(runs)} newest" if len(runs) == MAX_CHART_RUNS else ""
    return Chart(
        figure,
        f"One row per run{newest}. Colour: rows that the probe stored; empty: not measured.",
        cell_links=[[query_link(_page_path(probe), run=run.path.name) for probe in rows_by_probe] for run in runs],
    )


def _page_path(probe: Declaration) -> str:
    """The page that shows the data of a probe: its own, else that of trainings or of heads."""
    if probe.tab is not None:
        return probe.path
    return "/checkpoints" if probe.group == "Training" else "/heads"


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
                "state": "finished",
                "started": str(manifest.get("started", ""))[:16].replace("T", " "),
                "models": ", ".join(run.models),
                "MB": run.derived(_megabytes),
                "minutes": round(manifest.get("timings", {}).get("seconds", 0) / 60, 1),
                "probes": ", ".join(_probe_names(manifest)),
                "tags": ", ".join(notes.tags),
                "note": notes.note,
                "rows": sum(table["rows"] for table in manifest["tables"].values()),
                "tables": ", ".join(run.tables),
                "href": build_url("/", {"run": name}),
            }
        else:
            yield _incomplete_record(name, f"cannot be read: {run}")
    for progress in current_store().progress():
        yield _incomplete_record(progress.name, "unfinished")


def _megabytes(run: RunTables) -> float:
    """Size of the tables of a run, computed once as long as run.json stays the same."""
    return round(sum(file.stat().st_size for file in run.path.glob("*.parquet")) / 1e6, 2)


def _incomplete_record(name: str, state: str) -> dict[str, Any]:
    texts, numbers = ("started", "models", "probes", "tags", "note", "tables"), ("MB", "minutes", "rows")
    return {"run": name, "state": state, **dict.fromkeys(texts, ""), **dict.fromkeys(numbers), "href": ""}


def _probe_names(manifest: Mapping[str, Any]) -> list[str]:
    config = manifest.get("config") or {}
    return [name for name in plugins.probes() if config.get(name)]


def _changes(earlier: Run, later: Run) -> Iterator[TextTable]:
    """Results that changed between two runs, and heads that gained or lost a role."""
    yield from comparison_tables(compare(earlier, later))


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
