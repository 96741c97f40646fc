"""Several runs stored as one: what was measured piece by piece, as one folder to keep and share."""

from collections.abc import Sequence
from pathlib import Path

from headscope.errors import BadInput
from headscope.runs.run import Run, combine_runs
from headscope.runs.writer import RunWriter

OWN_KEYS = ("models", "tables", "files", "format_version", "started", "finished")
"""What the joined run tells of itself; all else in run.json is told by the part that it is of."""


def join(runs: Sequence[Run], out: Path, name: str) -> Run:
    """Store runs as they are read as one, with what each tells of how it was made.

    Files beside the tables (adapters, checkpoints) stay where they are. Raises BadInput for one run alone and where two
    runs tell of one thing differently, CannotWrite where `out` cannot be written.
    """
    if len({run.path.resolve() for run in runs}) < len(runs) or len(runs) < 2:
        raise BadInput("a run is joined to others: name two runs or more, each once")
    whole = combine_runs(runs)
    whole.check()
    for table, rows in whole.dropped.items():
        raise BadInput(f"{rows:,} rows of table {table} are told otherwise by another of these runs: leave one out")
    told = {run.name: {key: value for key, value in run.manifest.items() if key not in OWN_KEYS} for run in runs}
    seconds = sum(run.manifest.get("timings", {}).get("seconds", 0) for run in runs)
    with RunWriter.open(out, name, {"name": name, "joined": told}, resume=True) as writer:
        if not writer.is_done("all"):  # it was killed before the commit
            writer.add("all", {table: whole.table(table) for table in whole.tables})
        return writer.commit(["all"], {"models": whole.manifest["models"], "timings": {"seconds": round(seconds, 1)}})
