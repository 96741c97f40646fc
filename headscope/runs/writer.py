"""Writes a run job by job and commits it by one rename.

An unfinished run is OUT/.<slug>-<hash8>.partial/ with a lock, a draft of run.json and one file per finished job. The
first line of that file holds the sha256 of a JSON header, a space, and that header: key "job" names the job, "inputs"
has the digests of inputs that no earlier job recorded, "tables" the length in bytes and the sha256 of each table,
"versions" those of the libraries. The tables follow as Arrow streams.

Every step is a rename, so a kill at any moment leaves either the state before or the state after.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
from filelock import FileLock, Timeout

from headscope.base.output_files import MAX_NAME_BYTES, check_run_folder, missing_folders, remove_empty
from headscope.base.signals import uninterrupted
from headscope.errors import BadInput, BadRun, CannotWrite, InputChanged
from headscope.runs import arrow
from headscope.runs.arrow import Rows, to_arrow
from headscope.runs.columns import FORMAT_VERSION, Table, all_tables
from headscope.runs.io import fsync, read_json, sha256, write_json
from headscope.runs.job_files import StoredTable, data_digest, read_header, read_tables, repair_advice
from headscope.runs.manifest import write_manifest
from headscope.runs.merging import write_merged
from headscope.runs.run import PLAN_FILE, CombinedRun, Run

log = logging.getLogger("headscope")

WRITER_KEYS = ("models", "tables", "files", "format_version", "started", "finished", "digest")
"""Entries of run.json that the combined run writes itself; the others are kept per part."""


class RunWriter:
    """Writes one run. Get one from `RunWriter.open`, use it as a context manager, end with `commit`.

    Files in `files_folder` at the commit become part of the run unchanged.
    """

    def __init__(self, partial: Path, lock: FileLock, draft: dict[str, Any], new_folders: Sequence[Path] = ()) -> None:
        self.partial_path = partial
        self.cells_folder = partial / "cells"
        self.files_folder = partial / "files"
        self.draft = draft
        self.final_path = _final_path(partial, draft["started"])
        self._lock: FileLock | None = lock
        self._new_folders = new_folders

    @classmethod
    def open(cls, out: Path, slug: str, config: Mapping[str, Any], resume: bool = False) -> Self:
        """Start the run of `config` under `out`, or with `resume` continue an interrupted one.

        `config` is JSON data; its hash becomes part of the name. Raises CannotWrite if finished jobs of the same run
        exist and `resume` is off, if another process writes the run, or if `out` cannot be written.
        """
        partial = Path(out) / f".{slug}-{hashlib.sha256(_canonical_json(config)).hexdigest()[:8]}.partial"
        with convert_write_errors(out):
            new_folders = missing_folders(partial)
            (partial / "cells").mkdir(parents=True, exist_ok=True)
            lock = _acquire_lock(partial)
            try:
                draft = cls._draft(partial, config, resume)
            except BaseException:
                if new_folders:
                    _discard(partial, new_folders)
                lock.release()
                raise
        return cls(partial, lock, draft, new_folders)

    @staticmethod
    def _draft(partial: Path, config: Mapping[str, Any], resume: bool) -> dict[str, Any]:
        """The draft of run.json: that of the run to continue, or a new one."""
        shutil.rmtree(partial.with_suffix(".trash"), ignore_errors=True)
        draft = _read_draft(partial, config) if (partial / "run.json").is_file() else None
        if draft and resume and (job_files := sorted((partial / "cells").iterdir())):
            inputs = [read_header(job_file)["inputs"] for job_file in job_files]
            return draft | {"inputs": {name: digest for part in inputs for name, digest in part.items()}}
        if draft and _final_path(partial, draft["started"]).is_dir():
            for folder in ("cells", "files", "state"):  # killed between the commit and its clean-up: start again
                shutil.rmtree(partial / folder, ignore_errors=True)
            (partial / "cells").mkdir()
        elif any((partial / "cells").iterdir()):
            if draft is None:
                raise BadRun(f"{partial / 'run.json'} is missing. Delete {partial} to start again")
            raise CannotWrite(
                f"{partial} is an unfinished run of the same study. Add --resume to continue it, or delete it to "
                "start again"
            )
        draft = {"format_version": FORMAT_VERSION, "started": _free_start(partial), "config": dict(config)}
        _write_draft(partial, draft)
        return draft

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Keep the finished jobs of an uncommitted run; remove the folder if there are none."""
        with uninterrupted():
            if self._lock is not None:
                if not any(self.cells_folder.iterdir()):
                    _discard(self.partial_path, self._new_folders)
                self._lock.release()

    @property
    def is_committed(self) -> bool:
        """Whether the run has its final name."""
        return self._lock is None

    def record_versions(self, versions: Mapping[str, str]) -> None:
        """Record the versions of libraries of the process that started the run."""
        if "versions" not in self.draft:
            self.draft["versions"] = dict(versions)
            with convert_write_errors(self.final_path.parent):
                _write_draft(self.partial_path, self.draft)

    def stored_versions(self) -> list[dict[str, str]]:
        """The versions of libraries that finished jobs were measured with, each set once; {} if none are recorded."""
        jobs = sorted(self.cells_folder.iterdir())
        sets: list[dict[str, str]] = []
        for job_file in jobs:
            versions = read_header(job_file).get("versions") or self.draft.get("versions") or {}
            if versions not in sets:
                sets.append(versions)
        return sets

    def record_plan(self, jobs: int) -> None:
        """Store the number of jobs that the run will have, so that others can show its progress."""
        with convert_write_errors(self.final_path.parent):
            write_json(self.partial_path / PLAN_FILE, {"cells": jobs})

    def find_finished(self, inputs: Mapping[str, str]) -> Run | None:
        """A finished run of this config and these inputs, unless there are unfinished jobs to continue.

        Warns of such a run if it has files that cannot be read, and passes over it.
        """
        if self.final_path.is_dir():  # a kill fell between the commit and its clean-up
            return self.commit([], {})
        if any(self.cells_folder.iterdir()):
            return None
        for folder in sorted(self.final_path.parent.glob(f"[!.]*-{self.partial_path.stem[1:]}"), reverse=True):
            try:
                run = Run.open(folder)
            except BadRun as error:
                log.warning("cannot tell whether %s is finished; measuring it again: %s", folder, error)
                continue
            recorded_inputs = run.manifest.get("inputs")
            has_same_config = _canonical_json(run.manifest.get("config", {})) == _canonical_json(self.draft["config"])
            if has_same_config and isinstance(recorded_inputs, dict) and inputs.items() <= recorded_inputs.items():
                if not (files := run.unreadable_files()):
                    return run
                log.warning("finished run %s is damaged (%s); measuring it again", folder, ", ".join(files))
        return None

    def check_inputs(self, inputs: Mapping[str, str]) -> None:
        """Raise InputChanged if one of `inputs`, digests by name, differs from those of the finished jobs."""
        recorded_inputs = self.draft.get("inputs", {})
        changed = [
            input_name for input_name, digest in inputs.items() if recorded_inputs.get(input_name, digest) != digest
        ]
        if changed:
            has_weights = any(name.startswith("the weights of ") for name in changed)
            note = " (by their files: equal weights that were saved again count as changed)" if has_weights else ""
            raise InputChanged(
                f"cannot resume this run: {' and '.join(changed)} changed{note} since its finished work items were "
                f"measured. Restore the previous state, or delete {self.partial_path} to start again"
            )

    def is_done(self, job_id: str) -> bool:
        """Whether this job is stored. Raises BadRun if it is damaged."""
        job_file = self._job_file(job_id)
        if job_file.exists():
            if read_header(job_file).get("job") != job_id:
                raise BadRun(f"{job_file} is damaged: it holds another work item. {repair_advice(job_file)}")
            for table in read_tables(job_file).values():
                table.read()
        return job_file.exists()

    def read_stored(self, job_id: str, table: str) -> pd.DataFrame:
        """The rows that a finished job added to a table. Raises BadRun if they are missing or damaged."""
        frame: pd.DataFrame = read_tables(self._job_file(job_id))[table].read_table().to_pandas()
        return frame

    def stored_tables(self, job_id: str) -> list[str]:
        """Names of the tables that a finished job added rows to."""
        return [*read_tables(self._job_file(job_id))]

    def size(self, job_id: str) -> int:
        """Size of a finished job in bytes."""
        return self._job_file(job_id).stat().st_size

    def add(
        self,
        job_id: str,
        tables: Mapping[str, Rows],
        inputs: Mapping[str, str] = MappingProxyType({}),
        versions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Store the rows of one finished job, the digests of its inputs and the versions of libraries by name.

        All of it is stored, or nothing.

        Raises ValueError naming table and column for rows that break the schema (a bug of the probe): missing or
        unknown columns, NaN, a key out of range. Raises InputChanged as `check_inputs` does, and CannotWrite if the
        disk is full.
        """
        self.check_inputs(inputs)
        recorded_inputs = self.draft.setdefault("inputs", {})
        parts = {name: arrow.to_bytes(to_arrow(all_tables()[name], rows)) for name, rows in tables.items()}
        contents = {
            "job": job_id,
            "inputs": {name: digest for name, digest in inputs.items() if name not in recorded_inputs},
            "tables": {name: [len(data), data_digest(data)] for name, data in parts.items()},
            "versions": dict(versions),
        }
        header = json.dumps(contents).encode()
        staging = self.partial_path / "staging"
        with convert_write_errors(self.final_path.parent, staging):
            staging.write_bytes(b"".join([data_digest(header).encode(), b" ", header, b"\n", *parts.values()]))
            fsync(staging)
            os.rename(staging, self._job_file(job_id))
            fsync(self.cells_folder)
        recorded_inputs |= inputs

    def commit(self, job_ids: Sequence[str], manifest: Mapping[str, Any]) -> Run:
        """Merge the jobs in the order of `job_ids` and publish the run under its final name.

        `manifest` holds the other entries of run.json (models, versions, seed, hardware, timings). Raises ValueError
        for a job that was never added and CannotWrite if the disk is full; the jobs are then kept.
        """
        job_files = {job_id: self._job_file(job_id) for job_id in job_ids}
        if missing := [job_id for job_id, job_file in job_files.items() if not job_file.exists()]:
            raise ValueError(f"job {missing[0]!r} was never added")
        build = self.partial_path / "commit"
        with uninterrupted():
            with convert_write_errors(self.final_path.parent, build):
                if not self.final_path.is_dir():  # it exists if a kill came between the rename and the clean-up
                    shutil.rmtree(build, ignore_errors=True)
                    build.mkdir()
                    self._build(build, job_files, manifest)
                    fsync(build)
                    os.rename(build, self.final_path)
                    fsync(self.final_path.parent)
                _discard(self.partial_path)
            assert self._lock is not None
            self._lock.release()
            self._lock = None
        return Run.open(self.final_path)

    def _build(self, build: Path, job_files: Mapping[str, Path], manifest: Mapping[str, Any]) -> None:
        facts, started = {}, time.monotonic()
        tables_of_jobs = [read_tables(job_file) for job_file in job_files.values()]
        for name, table in all_tables().items():
            stored_tables = [tables[name] for tables in tables_of_jobs if name in tables]
            if stored_tables:
                target = build / f"{name}.parquet"
                rows = write_merged(target, table, [partial(_declared_rows, table, stored) for stored in stored_tables])
                fsync(target)
                facts[name] = {"rows": rows, "sha256": sha256(target)}
        commit_seconds = round(time.monotonic() - started, 1)
        extra_files = {}
        for file in sorted(path for path in self.files_folder.rglob("*") if path.is_file()):
            name = file.relative_to(self.files_folder).as_posix()
            (build / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, build / name)
            extra_files[name] = sha256(file)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        complete_manifest = {**self.draft, **manifest, "finished": finished, "tables": facts, "files": extra_files}
        complete_manifest |= self._versions_by_cell(job_files)
        if "timings" in manifest:
            complete_manifest["timings"] = {**manifest["timings"], "commit_seconds": commit_seconds}
        write_manifest(build, complete_manifest)

    def _versions_by_cell(self, job_files: Mapping[str, Path]) -> dict[str, Any]:
        """The entry `versions_by_cell` of run.json: sets of versions with their cells, if there are several sets."""
        stored = self.stored_versions()
        if len(stored) < 2:
            return {}
        of_job = {
            job_id: read_header(job_file).get("versions") or self.draft.get("versions") or {}
            for job_id, job_file in job_files.items()
        }
        sets = [
            {"versions": versions, "cells": [job_id for job_id, own in of_job.items() if own == versions]}
            for versions in stored
        ]
        return {"versions_by_cell": sets}

    def _job_file(self, job_id: str) -> Path:
        name = quote(job_id, safe=" =@,")
        if len(name) > MAX_NAME_BYTES:
            name = f"{name[: MAX_NAME_BYTES - 65]} {hashlib.sha256(job_id.encode()).hexdigest()}"
        return self.cells_folder / name


@contextmanager
def convert_write_errors(out: Path, scratch: Path | None = None) -> Iterator[None]:
    """Convert OSError into CannotWrite and remove half-written files in `scratch`."""
    try:
        yield
    except OSError as error:
        if scratch:
            if scratch.is_dir():
                shutil.rmtree(scratch, ignore_errors=True)
            else:
                scratch.unlink(missing_ok=True)
        advice = "Free some space" if error.errno == errno.ENOSPC else "Choose another --out"
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow's own text is long
        raise CannotWrite(f"cannot write to {out}: {reason}. {advice}") from error


def join_runs(runs: Sequence[Run], out: Path, name: str, announce: Callable[[str], None] = lambda _: None) -> Run:
    """Store the combination of several runs, with the metadata of each. Memory holds one of the runs at a time.

    `announce` is called with the name of each run before it is read.

    Files other than tables (adapters, checkpoints) are not copied. Raises BadInput for a single run and for runs with
    different values for the same key, CannotWrite if `out` cannot be written.
    """
    if len({os.path.realpath(run.path) for run in runs}) < len(runs) or len(runs) < 2:
        raise BadInput("join needs several runs. Name two or more, each once")
    out = check_run_folder(out)
    combined = CombinedRun(runs)
    combined.check()
    for table, rows in combined.conflicting_row_counts.items():
        raise BadInput(f"{rows:,} rows of table '{table}' differ between these runs. Join them without one of the runs")
    metadata = {run.name: {key: value for key, value in run.manifest.items() if key not in WRITER_KEYS} for run in runs}
    seconds = sum(run.manifest.get("timings", {}).get("seconds", 0) for run in runs)
    with RunWriter.open(out, name, {"name": name, "joined": metadata}, resume=True) as writer:
        jobs = [f"{index} {run.name}" for index, run in enumerate(runs)]
        for index, job in enumerate(jobs):
            announce(runs[index].name)
            if not writer.is_done(job):  # an earlier attempt was killed before the commit
                writer.add(job, combined.part_tables(index))
        return writer.commit(jobs, {"models": combined.manifest["models"], "timings": {"seconds": round(seconds, 1)}})


def _acquire_lock(partial: Path) -> FileLock:
    lock = FileLock(partial / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CannotWrite(f"{partial} is being written by another process. Wait until it is finished") from None
    return lock


def _discard(partial: Path, new_folders: Sequence[Path] = ()) -> None:
    """Remove a partial directory in one step, and those of the new folders around it that are then empty.

    The next `open` removes what a kill leaves of it.
    """
    trash = partial.with_suffix(".trash")
    os.rename(partial, trash)
    shutil.rmtree(trash, ignore_errors=True)
    remove_empty([folder for folder in new_folders if folder != partial])


def _canonical_json(config: Mapping[str, Any]) -> bytes:
    """Canonical JSON of a config; its digest is part of the run's name."""
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def _write_draft(partial: Path, draft: Mapping[str, Any]) -> None:
    write_json(partial / "draft", draft)
    os.rename(partial / "draft", partial / "run.json")


def _read_draft(partial: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The draft of the run of `config`. Raises BadRun if it is damaged."""
    draft = read_json(partial / "run.json", f"Delete {partial} to start again")
    try:
        _final_path(partial, draft["started"])
        if _canonical_json(draft["config"]) == _canonical_json(config):
            return draft
    except (KeyError, TypeError, ValueError):
        pass
    raise BadRun(f"{partial / 'run.json'} is damaged: it belongs to another study. Delete {partial} to start again")


def _final_path(partial: Path, started: str) -> Path:
    return partial.with_name(f"{datetime.fromisoformat(started):%Y%m%dT%H%M%SZ}-{partial.stem[1:]}")


def _free_start(partial: Path) -> str:
    """The current time, or the first later second that no finished run of this name uses."""
    now = datetime.now(UTC).replace(microsecond=0)
    while _final_path(partial, now.isoformat()).exists():
        now += timedelta(seconds=1)
    return now.isoformat()


def _declared_rows(table: Table, stored: StoredTable) -> pa.Table:
    """The rows of a job. Raises BadRun if a version with other columns stored them."""
    return arrow.select_declared(table, stored.read_table(), stored.file)
