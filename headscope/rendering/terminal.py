"""Terminal output for a run: a table of its models, headlines and claims; also as plain data for JSON.

Names come from users, so text is never parsed as rich markup; `bold` adds emphasis.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from headscope.rendering import assembly, run_results
from headscope.rendering.console import bold, print_line, print_table
from headscope.rendering.text import explain_columns, statistics_table, value_columns
from headscope.results.collection import all_results, results_of_all_models
from headscope.results.table import results_table
from headscope.results.words import count_nouns, sentence
from headscope.runs.column_metadata import ENDINGS
from headscope.runs.run import Run
from headscope.runs.summary import default_models, evenly_spaced, model_table

MAX_MODEL_COLUMNS = 3
"""A table of more models has a row for each."""
MAX_TABLE_LINES = 26
HEADING_LINES = 4
"""Lines of the headings of a table with a row per model."""
COLUMN_WIDTH = 19
"""Characters that a statistic needs, with its interval below its value."""


def print_summary(run: Run, show_all: bool = False) -> None:
    """Print the path of the run, the models in one table, headlines, and the number of claims with each verdict.

    With `show_all`, print all models and statistics, and every result by topic instead of the headlines. The first
    results stand for the headlines of a run that has none.
    """
    print_line("Run: ", run.path)
    _print_models(run, show_all)
    if show_all:
        for topic, results in assembly.results_by_topic(run).items():
            print_line(bold(topic))
            for result in results:
                print_line("  ", sentence(result))
    else:
        rows, headlines = run_results.row_lines(run), run_results.headline_lines(run)
        others = [] if rows or headlines else [*map(sentence, all_results(run))]
        for heading, lines in (("By prompt", rows), ("Headlines", headlines), ("Results", others)):
            if lines:
                print_line(bold(heading))
            for line in lines[: run_results.MAX_ROWS]:
                print_line("  ", line)
            if len(lines) > run_results.MAX_ROWS:
                print_line("  ", f"{len(lines) - run_results.MAX_ROWS} more with --all")
    if verdicts := run_results.count_verdicts(all_results(run)):
        print_line(bold("Claims of the paper"), f": {verdicts} (headscope report shows why)")
    if not show_all:
        print_line(run_results.LEGEND, " --all prints every result.")


def print_next_steps(run: Run) -> None:
    """Print suggested next steps for the run."""
    print_line(f"Next: headscope report {run.path}")
    for line in assembly.collect_next_steps(run):
        print_line(line)


def print_warnings(run: Run) -> None:
    """Print the warnings among the results to standard error."""
    for line in run_results.warning_lines(run):
        print(f"headscope: {line}", file=sys.stderr)


def print_run_entry(run: Run) -> None:
    """Print a run in two lines: its models, at most six, and its tables."""
    rows = ", ".join(f"{name} {table['rows']:,}" for name, table in run.manifest["tables"].items())
    labels = evenly_spaced(run.models)
    count = f"{len(run.models)} models, including " if len(run.models) > len(labels) else ""
    print_line(bold(run.name), "  ", count, ", ".join(labels), "\n    ", rows)


def run_to_dict(run: Run, include_summary: bool = True) -> dict[str, Any]:
    """The run as JSON data: path, models, rows per table and seconds.

    With `include_summary` also the per-model table under "summary", all results under "results", and the data of each
    overview under its name.
    """
    data: dict[str, Any] = {
        "path": str(run.path),
        "models": run.models,
        "tables": {name: table["rows"] for name, table in run.manifest["tables"].items()},
        "seconds": run.manifest.get("timings", {}).get("seconds"),
    }
    if include_summary:
        data["summary"] = _to_records(model_table(run))
        data["results"] = _to_records(results_table(results_of_all_models(run)))
        data |= {overview.name: _to_records(overview.data) for overview in assembly.collect_overviews(run)}
    return data


def _to_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts, with None for NaN."""
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return records


def _print_models(run: Run, show_all: bool) -> None:
    """Print the statistics of the models: a column per model, or rows of models if there are more than three.

    A table that is wider than the terminal continues below. Unless `show_all`, it has the models that charts show, and
    as many statistics as fit into `MAX_TABLE_LINES`.
    """
    frame = model_table(run)
    listed_models = frame if show_all else frame[frame["model"].isin(default_models(run))]
    names = [name for name in value_columns(frame) if name != "model"]
    has_model_rows = len(listed_models) > MAX_MODEL_COLUMNS
    label_width = max(map(len, listed_models["model"]), default=0)
    band = max(1, (Console().width - label_width) // COLUMN_WIDTH) if has_model_rows else MAX_TABLE_LINES
    band_lines = 2 * len(listed_models) + HEADING_LINES if has_model_rows else MAX_TABLE_LINES
    room = band * max(1, MAX_TABLE_LINES // band_lines)
    listed_names = names if show_all else names[:room]
    title = "Models; statistics of heads are medians"
    for start in range(0, len(listed_names), band):
        _print_statistics(listed_models, listed_names[start : start + band], has_model_rows, "" if start else title)
    for line in explain_columns(listed_names):
        print_line(line)
    counts = {"more models": len(frame) - len(listed_models), "more statistics": len(names) - len(listed_names)}
    if omitted := " and ".join(count_nouns(count, nouns) for nouns, count in counts.items() if count):
        print_line(f"{omitted} with --all")


def _print_statistics(frame: pd.DataFrame, names: Sequence[str], has_model_rows: bool, title: str) -> None:
    """Print these columns of the table of models; in a row of a model, an interval is below its value."""
    kept_names = {"model", *names, *(f"{name}_{ending}" for name in names for ending in ENDINGS)}
    table = statistics_table("", frame[[name for name in frame if name in kept_names]])
    lines = [["", *table.column_names[1:]], *([str(cell) for cell in row] for row in table.rows)]
    if has_model_rows:
        headings, *rows = [[line[0], *(text.replace(" (", "\n(") for text in line[1:])] for line in lines]
    else:
        headings, *rows = [[*line] for line in zip(*lines, strict=True)]
    print_table([dict(zip(headings, row, strict=True)) for row in rows], title)
