"""Checks of a stored run."""

from pathlib import Path

import pyarrow as pa

from headscope.errors import BadRun
from headscope.runs import arrow
from headscope.runs.columns import FORMAT_VERSION
from headscope.runs.io import sha256
from headscope.runs.old_names import translate_table
from headscope.runs.run_tables import RunTables
from headscope.runs.schema import all_tables


def validate(run: RunTables) -> list[str]:
    """Problems of a run's files, one line each: digests, row counts, schemas, NaN, bounds, duplicate keys."""
    problems = [f"{name}: no table of format {FORMAT_VERSION}" for name in run.tables if name not in all_tables()]
    for name, facts in run.manifest["tables"].items():
        if name not in all_tables():
            continue
        file = run.path / f"{facts.get('file', name)}.parquet"
        try:
            stored = arrow.read(file)
        except BadRun as reason:
            problems.append(str(reason))
            continue
        if sha256(file) != facts["sha256"]:
            problems.append(f"{name}: sha256 differs from run.json")
        if stored.num_rows != facts["rows"]:
            problems.append(f"{name}: {stored.num_rows} rows, run.json says {facts['rows']}")
        try:
            if run.manifest["format_version"] == 1:
                stored = translate_table(name, stored)
            problems += arrow.table_problems(all_tables()[name], stored)
        except (pa.ArrowException, ValueError) as error:
            problems.append(f"{name}: its values cannot be read: {' '.join(str(error).split())[:200]}")
    for name, digest in run.manifest.get("files", {}).items():
        if _digest(run.path / name) != digest:
            problems.append(f"{name}: missing or changed")
    return problems


def _digest(file: Path) -> str | None:
    try:
        return sha256(file)
    except (OSError, ValueError):
        return None
