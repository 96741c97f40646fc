"""What the terminal shows of a run: a summary table, the findings, or the same as plain data."""

import json
import sys
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headscope.findings import sentences
from headscope.needles import overview
from headscope.store import Run
from headscope.summary import models, statistic


def say(text: str) -> None:
    """Print a line with rich's markup; what users named must be escaped."""
    Console(soft_wrap=True, highlight=False).print(text)


def summarise(run: Run) -> None:
    """Print where the run lies, its models side by side, and what it found."""
    say(f"Run: {escape(str(run.path))}")
    if "attention" in run.tables or "nll" in run.tables:
        print_table(_side_by_side(_records(run)), title="Median head, and mean loss")
    if "needles" in run.tables:
        print_table(_needles(run), title="Needle in a haystack")
    for heading, told in sentences(run).items():
        say(f"[bold]{heading}[/bold]")
        for sentence in told:
            say(f"  {escape(sentence)}")


def warn(run: Run) -> None:
    """Say on standard error which models found no needle: their heads have no score, which is not a score of 0."""
    for row in overview(run).to_dict("records") if "needles" in run.tables else ():
        if not row["successes"]:
            print(
                f"headscope: {row['model']} found the needle in none of {row['trials']} trials, so its heads have no "
                "retrieval score; its answers are in the table needles",
                file=sys.stderr,
            )


def list_run(run: Run) -> None:
    """Print one run as a line of models and a line of tables."""
    rows = ", ".join(f"{name} {table['rows']:,}" for name, table in run.manifest["tables"].items())
    say(f"[bold]{escape(run.name)}[/bold]  {escape(', '.join(run.models))}\n    {rows}")


def as_data(run: Run, summary: bool = True) -> dict[str, Any]:
    """The run as what JSON can hold: path, models, rows of each table, seconds and, on request, `summary.models` and,
    where needles were hidden, `needles.overview`."""
    brief: dict[str, Any] = {
        "path": str(run.path),
        "models": run.models,
        "tables": {name: table["rows"] for name, table in run.manifest["tables"].items()},
        "seconds": run.manifest["timings"]["seconds"],
    }
    if summary:
        brief["summary"] = _records(run) if run.models else []
        if "needles" in run.tables:
            brief["needles"] = _plain(overview(run))
    return brief


def print_table(rows: list[dict[str, Any]], title: str | None = None) -> None:
    """Print records as a table; their keys are the headings, the first column is never wrapped."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for position, name in enumerate(rows[0]):
        first = position == 0
        table.add_column(escape(name.replace("_", " ")), justify="left" if first else "right", no_wrap=first)
    for row in rows:
        table.add_row(*(escape(_shown(value)) for value in row.values()))
    Console().print(table)


def _records(run: Run) -> list[dict[str, Any]]:
    """`summary.models` as plain rows, None where there is no interval."""
    return _plain(models(run))


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return records


def _needles(run: Run) -> list[dict[str, Any]]:
    """One row a model and mode: success with its interval, shares of heads and the top head, in words."""
    rows = []
    for row in overview(run).to_dict("records"):
        heads = {
            "heads > 0.1": f"{row['above']:.1%}",
            "heads at 0": f"{row['zero']:.1%}",
            "top head": f"L{row['layer']:.0f} H{row['head']:.0f}: {row['top']:.2f}",
        }
        rows.append(
            {
                "model": row["model"],
                "mode": row["mode"],
                "found": f"{row['successes']}/{row['trials']} [{row['low']:.0%}, {row['high']:.0%}]",
                **(heads if row["successes"] else dict.fromkeys(heads, "no score")),
                "without needle": row["control"],
            }
        )
    return rows


def _side_by_side(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a statistic and one column a model; an interval goes behind its value."""
    rows = []
    for name in records[0]:
        if name == "model" or name.endswith(("_low", "_high")):
            continue
        row: dict[str, Any] = {"": _label(name, records[0]["model"])}
        for record in records:
            low, high = record.get(f"{name}_low"), record.get(f"{name}_high")
            interval = "" if low is None or low == high else f" [{low:.3g}, {high:.3g}]"
            row[record["model"]] = f"{_shown(record[name])}{interval}"
        rows.append(row)
    return rows


def _label(name: str, first: str) -> str:
    """Words for a column of `summary.models`."""
    if name.startswith("nll"):
        length = name.split("_")[1]
        return f"  difference to {first}" if name.endswith("_diff") else f"loss at {length} tokens, nats/token"
    known = statistic(name)
    return f"{known.label}{f', {known.unit}' if known.unit else ''}"


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
