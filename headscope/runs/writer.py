"""Writing a run: cell by cell, committed by one rename.

While it works, a run is OUT/.<slug>-<hash8>.partial/ with a lock, a draft of run.json and one folder per finished cell.
Every step is a rename, so that a kill at any moment leaves either the state before or the state after. How cells are
made is the affair of the study.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
from filelock import FileLock, Timeout

from headscope.errors import BadRun, CannotWrite, Changed
from headscope.runs import arrow
from headscope.runs.arrow import Rows, to_arrow
from headscope.runs.columns import FORMAT_VERSION
from headscope.runs.io import fsync, read_bytes, read_json, sha256, write_json
from headscope.runs.run import Run
from headscope.runs.schema import all_tables
from headscope.signals import uninterrupted

LONGEST_NAME = 255
"""Bytes of a file name."""
DIGESTS = "digests.json"
"""In a cell's folder: the sha256 of each of its tables."""


class RunWriter:
    """Writes one run. Get one from `RunWriter.open`, use it as a context manager, end with `commit`.

    What lies under `files` at the commit becomes part of the run as it is.
    """

    def __init__(self, partial: Path, lock: FileLock, draft: dict[str, Any]) -> None:
        self.partial = partial
        self.cells = partial / "cells"
        self.files = partial / "files"
        self.draft = draft
        self.final = _final(partial, draft["started"])
        self._lock: FileLock | None = lock

    @classmethod
    def open(cls, out: Path, slug: str, config: Mapping[str, Any], resume: bool = False) -> Self:
        """Start the run of `config` under `out`, or with `resume` continue the one that was interrupted.

        `config` is what JSON can hold; it names the run. Raises CannotWrite when finished cells of the same run
        lie there and `resume` is off, when another process writes it, or when `out` cannot be written.
        """
        partial = Path(out) / f".{slug}-{hashlib.sha256(_canonical(config)).hexdigest()[:8]}.partial"
        with _writing(out):
            existed = partial.is_dir()
            (partial / "cells").mkdir(parents=True, exist_ok=True)
            lock = _locked(partial)
            try:
                draft = cls._draft(partial, config, resume)
            except BaseException:
                if not existed:
                    _discard(partial)
                lock.release()
                raise
        return cls(partial, lock, draft)

    @staticmethod
    def _draft(partial: Path, config: Mapping[str, Any], resume: bool) -> dict[str, Any]:
        """The first lines of run.json: those of the run to continue, or new ones."""
        shutil.rmtree(partial.with_suffix(".trash"), ignore_errors=True)
        draft = _read_draft(partial, config) if (partial / "run.json").is_file() else None
        if draft and resume and any((partial / "cells").iterdir()):
            return draft
        if draft and _final(partial, draft["started"]).is_dir():
            shutil.rmtree(partial / "cells")  # a kill fell between the commit and its clean-up: start anew
            (partial / "cells").mkdir()
        elif any((partial / "cells").iterdir()):
            raise CannotWrite(f"{partial} holds this run, unfinished: add --resume or delete that directory")
        draft = {"format_version": FORMAT_VERSION, "started": _free_start(partial), "config": dict(config)}
        _write_draft(partial, draft)
        return draft

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Keep the finished cells of a run that was not committed; with none, leave nothing behind."""
        with uninterrupted():
            if self._lock is not None:
                if not any(self.cells.iterdir()):
                    _discard(self.partial)
                self._lock.release()

    @property
    def committed(self) -> bool:
        """Whether the run lies under its final name."""
        return self._lock is None

    def finished(self, inputs: Mapping[str, str]) -> Run | None:
        """A run of this config and these inputs that is finished already, unless cells wait to be gone on with."""
        if self.final.is_dir():  # a kill fell between the commit and its clean-up
            return self.commit([], {})
        if any(self.cells.iterdir()):
            return None
        for folder in sorted(self.final.parent.glob(f"[!.]*-{self.partial.stem[1:]}"), reverse=True):
            try:
                run = Run.open(folder)
            except BadRun:
                continue
            known = run.manifest.get("inputs")
            same = _canonical(run.manifest.get("config", {})) == _canonical(self.draft["config"])
            if same and isinstance(known, dict) and inputs.items() <= known.items():
                return run
        return None

    def compare(self, inputs: Mapping[str, str]) -> None:
        """Raises Changed if one of `inputs`, a digest by what it is of, is not what finished cells were made from."""
        known = self.draft.get("inputs", {})
        changed = [what for what, digest in inputs.items() if known.get(what, digest) != digest]
        if changed:
            raise Changed(
                f"cannot go on with this run: {' and '.join(changed)} changed since its finished cells were made; "
                f"put back what was there, or delete {self.partial} to start anew"
            )

    def note(self, inputs: Mapping[str, str]) -> None:
        """Write down what the cells that are added from now on are made from. Raises Changed as `compare` does."""
        self.compare(inputs)
        known = self.draft.setdefault("inputs", {})
        if not inputs.items() <= known.items():
            known |= inputs
            with _writing(self.final.parent):
                _write_draft(self.partial, self.draft)

    def done(self, cell_id: str) -> bool:
        """Whether this cell is stored. Raises BadRun if it is damaged."""
        cell = self._cell(cell_id)
        if cell.is_dir():
            for file, digest in _told(cell).items():
                read_bytes(file, digest, _mend(cell))
        return cell.is_dir()

    def stored(self, cell_id: str, table: str) -> pd.DataFrame:
        """The rows of a table that a finished cell added. Raises BadRun if they are not there, or damaged."""
        cell = self._cell(cell_id)
        file = cell / f"{table}.parquet"
        frame: pd.DataFrame = arrow.read(file, _told(cell).get(file), _mend(cell)).to_pandas()
        return frame

    def tables(self, cell_id: str) -> list[str]:
        """The tables that a finished cell added rows to."""
        return [file.stem for file in _told(self._cell(cell_id))]

    def size(self, cell_id: str) -> int:
        """Bytes of a finished cell's tables."""
        return sum(file.stat().st_size for file in _told(self._cell(cell_id)))

    def add(self, cell_id: str, tables: Mapping[str, Rows]) -> None:
        """Store the rows of one finished cell, all or nothing.

        Raises ValueError naming table and column for rows that break the schema (a bug of the measure):
        missing or unknown columns, a NaN, a key out of its range. Raises CannotWrite when the disk is full.
        """
        ready = {name: to_arrow(all_tables()[name], rows) for name, rows in tables.items()}
        staging = self.partial / "staging"
        with _writing(self.final.parent, staging):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            for name, table in ready.items():
                _write_table(staging / f"{name}.parquet", table)
            write_json(staging / DIGESTS, {name: sha256(staging / f"{name}.parquet") for name in ready})
            fsync(staging)
            os.rename(staging, self._cell(cell_id))
            fsync(self.cells)

    def commit(self, cell_ids: Sequence[str], manifest: Mapping[str, Any]) -> Run:
        """Join the cells in the order of `cell_ids` and publish the run under its final name.

        `manifest` holds what else run.json tells (models, versions, seed, hardware, timings). Raises ValueError
        for a cell that was never added and CannotWrite when the disk is full; the cells are then kept.
        """
        if missing := [cell for cell in cell_ids if not self._cell(cell).is_dir()]:
            raise ValueError(f"cell {missing[0]!r} was never added")
        build = self.partial / "commit"
        with uninterrupted():
            with _writing(self.final.parent, build):
                if not self.final.is_dir():  # it exists when a kill fell between the rename and the clean-up
                    shutil.rmtree(build, ignore_errors=True)
                    build.mkdir()
                    self._build(build, [self._cell(cell) for cell in cell_ids], manifest)
                    fsync(build)
                    os.rename(build, self.final)
                    fsync(self.final.parent)
                _discard(self.partial)
            assert self._lock is not None
            self._lock.release()
            self._lock = None
        return Run.open(self.final)

    def _build(self, build: Path, cells: list[Path], manifest: Mapping[str, Any]) -> None:
        facts = {}
        digests = {cell: _told(cell) for cell in cells}
        for name, table in all_tables().items():
            parts = [
                arrow.read(file, digest, _mend(cell))
                for cell, told in digests.items()
                for file, digest in told.items()
                if file.stem == name
            ]
            if parts:
                merged = arrow.merged(table, parts)
                _write_table(build / f"{name}.parquet", merged)
                facts[name] = {"rows": merged.num_rows, "sha256": sha256(build / f"{name}.parquet")}
        kept = {}
        for file in sorted(each for each in self.files.rglob("*") if each.is_file()):
            name = file.relative_to(self.files).as_posix()
            (build / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, build / name)
            kept[name] = sha256(file)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        whole = {**self.draft, **manifest, "finished": finished, "tables": facts, "files": kept}
        write_json(build / "run.json", whole)

    def _cell(self, cell_id: str) -> Path:
        name = quote(cell_id, safe=" =@,")
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 65]} {hashlib.sha256(cell_id.encode()).hexdigest()}"
        return self.cells / name


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


def _locked(partial: Path) -> FileLock:
    lock = FileLock(partial / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CannotWrite(f"{partial} is being written by another process: wait for it") from None
    return lock


def _discard(partial: Path) -> None:
    """Remove a partial directory in one step; what a kill leaves of the rest goes with the next `open`."""
    trash = partial.with_suffix(".trash")
    os.rename(partial, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _canonical(config: Mapping[str, Any]) -> bytes:
    """The one way to write a config, whose digest names the run."""
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def _write_draft(partial: Path, draft: Mapping[str, Any]) -> None:
    write_json(partial / "draft", draft)
    os.rename(partial / "draft", partial / "run.json")


def _read_draft(partial: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The draft of the run of `config`. Raises BadRun if it is damaged."""
    draft = read_json(partial / "run.json", f"delete {partial} to start anew")
    try:
        _final(partial, draft["started"])
        if _canonical(draft["config"]) == _canonical(config):
            return draft
    except (KeyError, TypeError, ValueError):
        pass
    raise BadRun(f"{partial / 'run.json'} is damaged: it is not of this study; delete {partial} to start anew")


def _final(partial: Path, started: str) -> Path:
    return partial.with_name(f"{datetime.fromisoformat(started):%Y%m%dT%H%M%SZ}-{partial.stem[1:]}")


def _free_start(partial: Path) -> str:
    """The time now, or the first second after it that no finished run of this name has taken."""
    now = datetime.now(UTC).replace(microsecond=0)
    while _final(partial, now.isoformat()).exists():
        now += timedelta(seconds=1)
    return now.isoformat()


def _told(cell: Path) -> dict[Path, str]:
    """The tables of a stored cell, with their digests."""
    return {cell / f"{name}.parquet": str(digest) for name, digest in read_json(cell / DIGESTS, _mend(cell)).items()}


def _mend(cell: Path) -> str:
    return f"delete {cell} and add --resume to measure it again"


def _write_table(file: Path, table: pa.Table) -> None:
    arrow.write(file, table)
    fsync(file)
