"""Run directories: written cell by cell, committed by one rename, read back as pandas tables.

What a table file may hold is the affair of `tables`, how cells are made that of the study. While it works,
a run is OUT/.<slug>-<hash8>.partial/ with a lock, a draft of run.json and one folder per finished cell.
Every step is a rename, so that a kill at any moment leaves either the state before or the state after.
"""

import errno
import fcntl
import hashlib
import html
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import pandas as pd
import pyarrow as pa

from headscope import tables
from headscope.errors import BadInput, BadRun, CannotWrite
from headscope.schema import FORMAT_VERSION, TABLES
from headscope.tables import Rows, to_arrow

T = TypeVar("T")


class RunWriter:
    """Writes one run. Get one from `RunWriter.open`, use it as a context manager, end with `commit`.

    What lies under `files` at the commit becomes part of the run as it is.
    """

    def __init__(self, partial: Path, lock: int, draft: dict[str, Any]) -> None:
        self.partial = partial
        self.cells = partial / "cells"
        self.files = partial / "files"
        self.draft = draft
        self.final = _final(partial, draft["started"])
        self._lock: int | None = lock

    @classmethod
    def open(cls, out: Path, slug: str, config: Mapping[str, Any], resume: bool = False) -> Self:
        """Start the run of `config` under `out`, or with `resume` continue the one that was interrupted.

        `config` is what JSON can hold; it names the run. Raises CannotWrite when finished cells of the same run
        lie there and `resume` is off, when another process writes it, or when `out` cannot be written.
        """
        canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
        partial = Path(out) / f".{slug}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}.partial"
        with _writing(out):
            existed = partial.is_dir()
            (partial / "cells").mkdir(parents=True, exist_ok=True)
            lock = _locked(partial)
            try:
                draft = cls._draft(partial, config, resume)
            except BaseException:
                if not existed:
                    _discard(partial)
                os.close(lock)
                raise
        return cls(partial, lock, draft)

    @staticmethod
    def _draft(partial: Path, config: Mapping[str, Any], resume: bool) -> dict[str, Any]:
        """The first lines of run.json: those of the run to continue, or new ones."""
        shutil.rmtree(partial.with_suffix(".trash"), ignore_errors=True)
        draft = _read_json(partial / "run.json") if (partial / "run.json").is_file() else None
        if draft and resume:
            return draft
        if draft and _final(partial, draft["started"]).is_dir():
            shutil.rmtree(partial / "cells")  # a kill fell between the commit and its clean-up: start anew
            (partial / "cells").mkdir()
        elif any((partial / "cells").iterdir()):
            raise CannotWrite(f"{partial} holds this run, unfinished: add --resume or delete that directory")
        draft = {"format_version": FORMAT_VERSION, "started": _free_start(partial), "config": dict(config)}
        _write_json(partial / "draft", draft)
        os.rename(partial / "draft", partial / "run.json")
        return draft

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Keep the finished cells of a run that was not committed; with none, leave nothing behind."""
        if self._lock is not None:
            if not any(self.cells.iterdir()):
                _discard(self.partial)
            os.close(self._lock)

    def done(self, cell_id: str) -> bool:
        """Whether this cell is stored."""
        return self._cell(cell_id).is_dir()

    def stored(self, cell_id: str, table: str) -> pd.DataFrame:
        """The rows of a table that a finished cell added. Raises BadRun if they are not there."""
        frame: pd.DataFrame = tables.read(self._cell(cell_id) / f"{table}.parquet").to_pandas()
        return frame

    def add(self, cell_id: str, tables: Mapping[str, Rows]) -> None:
        """Store the rows of one finished cell, all or nothing.

        Raises ValueError naming table and column for rows that break the schema (a bug of the measure):
        missing or unknown columns, a NaN, a key out of its range. Raises CannotWrite when the disk is full.
        """
        ready = {name: to_arrow(TABLES[name], rows) for name, rows in tables.items()}
        staging = self.partial / "staging"
        with _writing(self.final.parent, staging):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            for name, table in ready.items():
                _write_table(staging / f"{name}.parquet", table)
            _fsync(staging)
            os.rename(staging, self._cell(cell_id))
            _fsync(self.cells)

    def commit(self, cell_ids: Sequence[str], manifest: Mapping[str, Any]) -> "Run":
        """Join the cells in the order of `cell_ids` and publish the run under its final name.

        `manifest` holds what else run.json tells (models, versions, seed, hardware, timings). Raises ValueError
        for a cell that was never added and CannotWrite when the disk is full; the cells are then kept.
        """
        if missing := [cell for cell in cell_ids if not self.done(cell)]:
            raise ValueError(f"cell {missing[0]!r} was never added")
        build = self.partial / "commit"
        with _writing(self.final.parent, build):
            if not self.final.is_dir():  # it exists when a kill fell between the rename and the clean-up
                shutil.rmtree(build, ignore_errors=True)
                build.mkdir()
                self._build(build, [self._cell(cell) for cell in cell_ids], manifest)
                _fsync(build)
                os.rename(build, self.final)
                _fsync(self.final.parent)
            _discard(self.partial)
        assert self._lock is not None
        os.close(self._lock)
        self._lock = None
        return Run.open(self.final)

    def _build(self, build: Path, cells: list[Path], manifest: Mapping[str, Any]) -> None:
        facts = {}
        for name, table in TABLES.items():
            if files := [file for cell in cells if (file := cell / f"{name}.parquet").is_file()]:
                merged = tables.merged(table, [tables.read(file) for file in files])
                _write_table(build / f"{name}.parquet", merged)
                facts[name] = {"rows": merged.num_rows, "sha256": _sha256(build / f"{name}.parquet")}
        kept = {}
        for file in sorted(each for each in self.files.rglob("*") if each.is_file()):
            name = file.relative_to(self.files).as_posix()
            (build / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, build / name)
            kept[name] = _sha256(file)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        whole = {**self.draft, **manifest, "finished": finished, "tables": facts, "files": kept}
        _write_json(build / "run.json", whole)

    def _cell(self, cell_id: str) -> Path:
        return self.cells / quote(cell_id, safe=" =@,")


class Run:
    """A finished run, read-only: `run.attention` and every other table by name, `run.heads` for the wide one.

    `manifest` is its run.json, `models` the labels in the order of the study, `tables` the names of what is
    stored, `parts` the runs that are read as one (only itself, unless `concatenate` made it).
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.name = path.name
        self.manifest = manifest
        self.models: list[str] = [model["label"] for model in manifest["models"]]
        self.tables: list[str] = list(manifest["tables"])
        self.parts: list[Run] = [self]
        self._frames: dict[str, pd.DataFrame] = {}
        self._derived: dict[Callable[[Run], Any], Any] = {}

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """Open the run directory `path`. Raises BadRun if it is none, unfinished, damaged or of a newer format."""
        path = Path(path)
        if not (path / "run.json").is_file():
            raise BadRun(f"{path} is not a run directory: it has no run.json")
        manifest = _read_json(path / "run.json")
        if (version := manifest.get("format_version", 0)) > FORMAT_VERSION:
            raise BadRun(f"{path} has format {version}, this headscope reads up to {FORMAT_VERSION}: upgrade headscope")
        if not {"tables", "models"} <= manifest.keys():
            raise BadRun(f"{path} is not a finished run: its run.json names no tables or no models")
        return Run(path, manifest)

    def table(self, name: str) -> pd.DataFrame:
        """The table `name`; labels are categoricals in order of first appearance. Do not edit it: it is cached.

        Raises BadRun when the run has no such table or its file is damaged.
        """
        if name not in self.tables:
            raise BadRun(f"{self.name} has no table '{name}', only {', '.join(self.tables)}")
        if name not in self._frames:
            self._frames[name] = self._read(name)
        return self._frames[name]

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One row per (model, layer, head): see `headscope.summary.heads`."""
        from headscope.summary import heads  # it imports this module

        return heads(self)

    def derived(self, make: "Callable[[Run], T]") -> "T":
        """`make(run)`, computed once. Do not edit it: it is cached."""
        if make not in self._derived:
            self._derived[make] = make(self)
        made: T = self._derived[make]
        return made

    def _read(self, name: str) -> pd.DataFrame:
        frame: pd.DataFrame = tables.read(self.path / f"{name}.parquet").to_pandas()
        return frame

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name in TABLES:
            return self.table(name)
        raise AttributeError(f"a run has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tables]

    def __repr__(self) -> str:
        return f"<Run {self.name}: {', '.join(self.models)}>"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{name}<td>{facts['rows']:,}" for name, facts in self.manifest["tables"].items())
        title = f"<b>{html.escape(self.name)}</b><br>models: {html.escape(', '.join(self.models))}"
        return f"{title}<table><tr><th>table<th>rows{rows}</table>"


class JoinedRun(Run):
    """Several runs read as one; see `concatenate`. `path` is the first run's."""

    def __init__(self, runs: Sequence[Run]) -> None:
        models = {model["label"]: model for run in reversed(runs) for model in run.manifest["models"]}
        labels = dict.fromkeys(label for run in runs for label in run.models)
        rows = {
            name: {"rows": sum(run.manifest["tables"].get(name, {"rows": 0})["rows"] for run in runs)}
            for name in TABLES
            if any(name in run.tables for run in runs)
        }
        super().__init__(runs[0].path, {"models": [models[label] for label in labels], "tables": rows})
        self.name = " + ".join(run.name for run in runs)
        self.parts = list(runs)

    def _read(self, name: str) -> pd.DataFrame:
        parts = [tables.read(run.path / f"{name}.parquet") for run in self.parts if name in run.tables]
        frame: pd.DataFrame = pa.concat_tables(parts).unify_dictionaries().to_pandas()
        return frame.drop_duplicates(TABLES[name].keys, ignore_index=True)


def concatenate(runs: Sequence[Run]) -> Run:
    """Read several runs as one; of rows with the same key the first run's is kept.

    Raises BadInput when one label names two different models (by weights or by scheme).
    """
    seen: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        for model in run.manifest["models"]:
            other, known = seen.setdefault(model["label"], (run, model))
            for what in ("weights_sha256", "scheme"):
                if model[what] != known[what]:
                    raise BadInput(
                        f"model '{model['label']}' has {what} {known[what]} in {other.name} but {model[what]} "
                        f"in {run.name}: give one another label, or read the runs apart"
                    )
    return runs[0] if len(runs) == 1 else JoinedRun(runs)


def runs(directory: Path | str) -> list[tuple[Path, Run | BadRun]]:
    """The finished runs in `directory`, newest first; one that cannot be read comes with the reason."""
    found: list[tuple[Path, Run | BadRun]] = []
    for file in sorted(Path(directory).glob("[!.]*/run.json"), reverse=True):
        try:
            found.append((file.parent, Run.open(file.parent)))
        except BadRun as reason:
            found.append((file.parent, reason))
    return found


def unfinished(directory: Path | str) -> dict[str, int]:
    """Stored cells of each run in `directory` that was interrupted or is still going on, by its future name."""
    found = sorted(Path(directory).glob(".*.partial/cells"))
    return {cells.parent.stem[1:]: sum(1 for _ in cells.iterdir()) for cells in found}


def validate(run: Run) -> list[str]:
    """What is wrong with a run's files, one line each: hashes, row counts, schemas, NaN, bounds, duplicate keys."""
    problems = [f"{name}: no table of format {FORMAT_VERSION}" for name in run.tables if name not in TABLES]
    for name, facts in run.manifest["tables"].items():
        if name not in TABLES:
            continue
        file = run.path / f"{name}.parquet"
        try:
            stored = tables.read(file)
        except BadRun as reason:
            problems.append(str(reason))
            continue
        if _sha256(file) != facts["sha256"]:
            problems.append(f"{name}: sha256 differs from run.json")
        if stored.num_rows != facts["rows"]:
            problems.append(f"{name}: {stored.num_rows} rows, run.json says {facts['rows']}")
        problems += tables.faults(TABLES[name], stored)
    for name, digest in run.manifest.get("files", {}).items():
        if not (run.path / name).is_file() or _sha256(run.path / name) != digest:
            problems.append(f"{name}: missing or changed")
    return problems


@contextmanager
def _writing(out: Path, scratch: Path | None = None) -> Iterator[None]:
    """Turn a failure of the disk into CannotWrite, and drop what was half-written in `scratch`."""
    try:
        yield
    except OSError as error:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        advice = "free some space" if error.errno == errno.ENOSPC else "choose another --out"
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow's own text is long
        raise CannotWrite(f"cannot write to {out}: {reason}; {advice}") from error


def _locked(partial: Path) -> int:
    lock = os.open(partial / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CannotWrite(f"{partial} is being written by another process: wait for it") from None
    return lock


def _discard(partial: Path) -> None:
    """Remove a partial directory in one step; what a kill leaves of the rest goes with the next `open`."""
    trash = partial.with_suffix(".trash")
    os.rename(partial, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _final(partial: Path, started: str) -> Path:
    return partial.with_name(f"{datetime.fromisoformat(started):%Y%m%dT%H%M%SZ}-{partial.stem[1:]}")


def _free_start(partial: Path) -> str:
    """The time now, or the first second after it that no finished run of this name has taken."""
    now = datetime.now(UTC).replace(microsecond=0)
    while _final(partial, now.isoformat()).exists():
        now += timedelta(seconds=1)
    return now.isoformat()


def _write_table(file: Path, table: pa.Table) -> None:
    tables.write(file, table)
    _fsync(file)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _fsync(file)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadRun(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadRun(f"{file} does not hold a JSON object")
    return value


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
