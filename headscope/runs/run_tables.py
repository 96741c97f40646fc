"""The tables of a finished run, read from disk as pandas frames, and checks of its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, TypeVarTuple

import pandas as pd
import pyarrow as pa

from headscope import user_input
from headscope.errors import BadRun
from headscope.runs import arrow
from headscope.runs.columns import FORMAT_VERSION, all_tables
from headscope.runs.io import printable_name, read_bytes, sha256
from headscope.runs.manifest import read_manifest
from headscope.runs.old_names import add_missing_columns, translate_table

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class RunTables:
    """The tables of a finished run, read-only: `run.attention` and every other by name.

    `manifest` is its run.json, `models` the labels in the order of the study, `tables` the names of what is
    stored, `parts` the runs that are combined (only itself for a single run).
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.name = printable_name(path.name)
        self.manifest = manifest
        self.models: list[str] = [model["label"] for model in manifest["models"]]
        self.tables: list[str] = list(manifest["tables"])
        self.parts: list[RunTables] = [self]
        self._frames: dict[str, pd.DataFrame] = {}
        self._derived: dict[tuple[Callable[..., Any], tuple[Any, ...]], Any] = {}

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the run directory `path`. Raises BadRun if it is not one, unfinished, damaged or of a newer format."""
        path = user_input.check_path(path, "run")
        return cls(path, read_manifest(path))

    def table(self, name: str) -> pd.DataFrame:
        """The table `name`; labels are categoricals in order of first appearance. It is cached: do not modify it.

        Raises BadRun if the run has no such table, or its file is damaged or has another schema.
        """
        if name not in self.tables:
            raise BadRun(f"{self.name} has no table '{name}'. Use one of: {', '.join(self.tables)}")
        if name not in self._frames:
            self._frames[name] = self._read(name)
        return self._frames[name]

    def derived(self, compute: Callable[[Self, *Arguments], T], *arguments: *Arguments) -> T:
        """`compute(run, *arguments)`, computed once and cached with the run. Do not modify it."""
        key = compute, arguments
        if key not in self._derived:
            self._derived[key] = compute(self, *arguments)
        result: T = self._derived[key]
        return result

    def check(self) -> None:
        """Raise BadRun if the file of any declared table is damaged, whether it was read or not."""
        for part in self.parts:
            for name in part.tables:
                if name in all_tables():
                    read_bytes(*part._file(name))

    def check_footers(self) -> None:
        """Raise BadRun if the file of a table is missing or not complete. Fast: it reads only the ends of the files."""
        for name in self.tables:
            arrow.check_footer(self._file(name)[0], self.manifest["tables"][name]["rows"])

    def arrow_table(self, name: str) -> pa.Table:
        """The stored table. Raises BadRun unless it matches the digest in run.json and the declared schema."""
        file, digest = self._file(name)
        table = arrow.read(file, digest)
        if self.manifest.get("format_version", FORMAT_VERSION) < FORMAT_VERSION:
            table = translate_table(name, table)
        table = add_missing_columns(name, table)
        return arrow.select_declared(all_tables()[name], table, file) if name in all_tables() else table

    def _file(self, name: str) -> tuple[Path, str]:
        """The file of a table and its sha256."""
        entry = self.manifest["tables"][name]
        return self.path / f"{entry.get('file', name)}.parquet", entry["sha256"]

    def _read(self, name: str) -> pd.DataFrame:
        frame: pd.DataFrame = self.arrow_table(name).to_pandas()
        return frame

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name in all_tables():
            return self.table(name)
        raise AttributeError(f"a run has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tables]

    def __repr__(self) -> str:
        return f"<Run {self.name}: {', '.join(self.models)}>"


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
            if run.manifest["format_version"] < FORMAT_VERSION:
                stored = translate_table(name, stored)
            stored = add_missing_columns(name, stored)
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
