"""Terminal output for a run: model comparison, probe overviews and findings, also as plain data for JSON.

Names come from users, so text is never parsed as rich markup; `bold` adds emphasis.
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
from headscope.report.text import column_heading, format_cell, value_columns
from headscope.results.collection import all_results
from headscope.results.questions import questions
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.runs.summary import evenly_spaced, model_table


def print_line(*fragments: object) -> None:
    """Print the fragments as one line, without markup."""
    line = Text.assemble(*(part if isinstance(part, Text) else str(part) for part in fragments))
    Console(soft_wrap=True, highlight=False).print(line)


def bold(text: object) -> Text:
    """A bold fragment of a line."""
    return Text(str(text), style="bold")


def print_summary(run: Run) -> None:
    """Print the path of the run, the model comparison, the probe overviews and the findings."""
    print_line("Run: ", run.path)
    if rows := _comparison_rows(model_table(run)):
        print_table(rows, title="Medians over heads and mean loss")
    for overview in assembly.collect_overviews(run):
        if overview.rows:  # an overview may have only warnings
            print_table(overview.rows, title=overview.title)
    for topic, results in assembly.results_by_topic(run).items():
        print_line(bold(topic))
        for result in results:
            print_line("  ", sentence(result))


def print_next_steps(run: Run) -> None:
    """Print suggested next steps for the run."""
    print_line(f"Next: headscope report {run.path}")
    for line in assembly.collect_next_steps(run):
        print_line(line)


def print_warnings(run: Run) -> None:
    """Print the warnings of the probes to standard error."""
    for overview in assembly.collect_overviews(run):
        for line in overview.warnings:
            print(f"headscope: {line}", file=sys.stderr)
    for result in all_results(run):
        if questions()[result.question].level == "warning":
            print(f"headscope: {sentence(result)}", file=sys.stderr)


def print_run_entry(run: Run) -> None:
    """Print a run in two lines: its models, at most six, and its tables."""
    rows = ", ".join(f"{name} {table['rows']:,}" for name, table in run.manifest["tables"].items())
    labels = evenly_spaced(run.models)
    count = f"{len(run.models)} models, including " if len(run.models) > len(labels) else ""
    print_line(bold(run.name), "  ", count, ", ".join(labels), "\n    ", rows)


def run_to_dict(run: Run, include_summary: bool = True) -> dict[str, Any]:
    """The run as JSON data: path, models, rows per table and seconds.

    With `include_summary` also the per-model table under "summary" and the data of each overview under its name.
    """
    data: dict[str, Any] = {
        "path": str(run.path),
        "models": run.models,
        "tables": {name: table["rows"] for name, table in run.manifest["tables"].items()},
        "seconds": run.manifest.get("timings", {}).get("seconds"),
    }
    if include_summary:
        data["summary"] = _to_records(model_table(run))
        data |= {overview.name: _to_records(overview.data) for overview in assembly.collect_overviews(run)}
    return data


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print records as a table with their keys as headings. Nothing is truncated.

    The first column is not wrapped if it has a heading.
    """
    table = Table(box=None, header_style="bold", title=Text(title) if title else None, title_justify="left")
    for position, name in enumerate(rows[0]):
        is_first = position == 0
        heading = Text(name.replace("_", " "))
        table.add_column(
            heading, justify="left" if is_first else "right", no_wrap=is_first and bool(name), overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(_format_value(value)) for value in row.values()))
    Console().print(table)


def _to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts, with None for NaN."""
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return records


def _comparison_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    """One row per statistic and one column per model, or transposed if there are more models than statistics.

    An interval is in brackets after its value.
    """
    by_model = {row["model"]: row for row in frame.to_dict("records")}
    names = [name for name in value_columns(frame) if name != "model"]
    if len(by_model) > len(names) > 0:
        return [
            {
                "model": model,
                **{column_heading(name): format_cell(row, name) for name in names},
            }
            for model, row in by_model.items()
        ]
    return [
        {
            "": column_heading(name),
            **{model: format_cell(row, name) for model, row in by_model.items()},
        }
        for name in names
    ]


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
