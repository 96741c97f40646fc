"""Stores several runs as one run directory."""

from collections.abc import Sequence
from pathlib import Path

from headscope.errors import BadInput
from headscope.runs.run import Run, combine_runs
from headscope.runs.writer import RunWriter

OWN_KEYS = ("models", "tables", "files", "format_version", "started", "finished")
"""Entries of run.json that the combined run writes itself; the others are kept per part."""


def join(runs: Sequence[Run], out: Path, name: str) -> Run:
    """Store the combination of several runs, with the metadata of each.

    Files other than tables (adapters, checkpoints) are not copied. Raises BadInput for a single run and for runs with
    different values for the same key, CannotWrite if `out` cannot be written.
    """
    if len({run.path.resolve() for run in runs}) < len(runs) or len(runs) < 2:
        raise BadInput("join needs several runs. Name two or more, each once")
    combined = combine_runs(runs)
    combined.check()
    for table, rows in combined.dropped.items():
        raise BadInput(f"{rows:,} rows of table {table} differ between these runs. Leave one run out")
    metadata = {run.name: {key: value for key, value in run.manifest.items() if key not in OWN_KEYS} for run in runs}
    seconds = sum(run.manifest.get("timings", {}).get("seconds", 0) for run in runs)
    with RunWriter.open(out, name, {"name": name, "joined": metadata}, resume=True) as writer:
        if not writer.is_done("all"):  # an earlier attempt was killed before the commit
            writer.add("all", {table: combined.table(table) for table in combined.tables})
        return writer.commit(
            ["all"], {"models": combined.manifest["models"], "timings": {"seconds": round(seconds, 1)}}
        )
