"""What the terminal shows of a run: models side by side, what each probe tells, the findings; or it as plain data.

Names come from users, so nothing is read as rich's markup: emphasis is put on with `bold`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headscope.report import assembly
from headscope.report.text import column_heading, evenly_spaced, format_cell, value_columns
from headscope.runs.run import Run
from headscope.runs.summary import models


def print_line(*fragments: object) -> None:
    """Print a line made of these parts, as they are."""
    line = Text.assemble(*(part if isinstance(part, Text) else str(part) for part in fragments))
    Console(soft_wrap=True, highlight=False).print(line)


def bold(text: object) -> Text:
    """A part of a line to stand out."""
    return Text(str(text), style="bold")


def print_summary(run: Run) -> None:
    """Print where the run lies, its models side by side, what each probe tells of it, and what it found."""
    print_line("Run: ", run.path)
    if rows := _comparison_rows(models(run)):
        print_table(rows, title="Median head, and mean loss")
    for overview in assembly.collect_overviews(run):
        if overview.rows:  # there may be nothing but a warning
            print_table(overview.rows, title=overview.title)
    for topic, found in assembly.findings_by_topic(run).items():
        print_line(bold(topic))
        for finding in found:
            print_line("  ", finding.text)


def print_next_steps(run: Run) -> None:
    """Print what to do with the run next."""
    print_line(f"Next: headscope report {run.path}")
    for line in assembly.collect_next_steps(run):
        print_line(line)


def print_warnings(run: Run) -> None:
    """Say on standard error what the probes warn of."""
    for overview in assembly.collect_overviews(run):
        for line in overview.warnings:
            print(f"headscope: {line}", file=sys.stderr)


def print_run_entry(run: Run) -> None:
    """Print one run as a line of models, few of many, and a line of tables."""
    rows = ", ".join(f"{name} {table['rows']:,}" for name, table in run.manifest["tables"].items())
    shown = evenly_spaced(run.models)
    count = f"{len(run.models)} models, among them " if len(run.models) > len(shown) else ""
    print_line(bold(run.name), "  ", count, ", ".join(shown), "\n    ", rows)


def run_to_dict(run: Run, include_summary: bool = True) -> dict[str, Any]:
    """The run as what JSON can hold: path, models, rows of each table, seconds and, on request, the per-model table and
    what each probe tells, by its name."""
    brief: dict[str, Any] = {
        "path": str(run.path),
        "models": run.models,
        "tables": {name: table["rows"] for name, table in run.manifest["tables"].items()},
        "seconds": run.manifest.get("timings", {}).get("seconds"),
    }
    if include_summary:
        brief["summary"] = _to_records(models(run))
        brief |= {overview.name: _to_records(overview.data) for overview in assembly.collect_overviews(run)}
    return brief


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print records as a table; their keys are the headings. Nothing is cut off; names in the first column, which has a
    heading then, are not wrapped either."""
    table = Table(box=None, header_style="bold", title=Text(title) if title else None, title_justify="left")
    for position, name in enumerate(rows[0]):
        first = position == 0
        heading = Text(name.replace("_", " "))
        table.add_column(heading, justify="left" if first else "right", no_wrap=first and bool(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_format_value(value)) for value in row.values()))
    Console().print(table)


def _to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, None where there is no number."""
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return records


def _comparison_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    """One row a statistic and one column a model, or the other way round where there are more models than statistics;
    an interval goes behind its value."""
    by_model = {row["model"]: row for row in frame.to_dict("records")}
    told = [name for name in value_columns(frame) if name != "model"]
    if len(by_model) > len(told) > 0:
        return [
            {
                "model": model,
                **{column_heading(name): format_cell(row, name) for name in told},
            }
            for model, row in by_model.items()
        ]
    return [
        {
            "": column_heading(name),
            **{model: format_cell(row, name) for model, row in by_model.items()},
        }
        for name in told
    ]


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
