"""The runs of one folder, opened by name. A name is looked up in the folder's listing, never joined to a path.

A listing reads run.json only. The tables of a run are checked when it is opened.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from flask import current_app

from headscope.errors import BadInput, BadRun, CannotWrite
from headscope.runs.notes import NOTES_FILE
from headscope.runs.run import Run, RunProgress, combine_runs, run_progress

READ_ONLY_REASON = (
    "this app writes nothing, because it shows the shipped runs or was started with --read-only. Start it on a folder "
    "of your own: headscope dash RUNS_DIR"
)
CACHED_SELECTIONS = 8
"""Combinations of runs that stay open; `MAX_CACHED_BYTES` limits what they keep in memory together."""
LISTED_RUNS = 4096
"""Entries of a listing that stay in memory, each with the content of one run.json."""
SCAN_SECONDS = 2.0
"""Time for which a scan of the folder is reused, unless a run is added, removed or renamed."""

FileStamp = tuple[str, int, int]
"""Path, modification time and size of a file."""


@dataclass(frozen=True)
class Scan:
    """What lies in the folder: the stamp of run.json of every run by name, newest first, the stamps of all notes, the
    unfinished runs, and when the folder was looked at."""

    folder: Path
    runs: Mapping[str, FileStamp]
    notes: tuple[FileStamp, ...]
    unfinished: Sequence[RunProgress]
    folder_changed: int
    time: float

    @cached_property
    def manifests(self) -> Mapping[str, Run | BadRun]:
        """Every run, or why its run.json cannot be read."""
        return {name: _read_manifest(self.folder / name, stamp) for name, stamp in self.runs.items()}


class RunStore:
    """The runs of a folder, including those that finish later.

    `path` is the folder, or one of its runs, which is then the default run, combined with the runs named by
    `combined_with`. The app writes nothing to the folder if `is_read_only`.
    """

    def __init__(self, path: Path, is_read_only: bool = False, combined_with: Sequence[str] = ()) -> None:
        self.is_read_only = is_read_only
        is_run = (path / "run.json").is_file()
        self.folder = path.parent if is_run else path
        self.default_runs = [path.name, *combined_with] if is_run else []
        self._scan: Scan | None = None
        self._damaged: dict[FileStamp, BadRun] = {}
        self.initial_names = {*self._current_scan().runs}

    def writable_folder(self) -> Path:
        """The folder, for the app to write to. Raises CannotWrite if it is read-only."""
        if self.is_read_only:
            raise CannotWrite(READ_ONLY_REASON)
        return self.folder

    def forget_scan(self) -> None:
        """Look at the folder again on next use: the app has written to it."""
        self._scan = None

    def list_runs(self) -> dict[str, Run | BadRun]:
        """Every finished run by name, newest first; an error for a run.json that cannot be read, and for a run whose
        tables were damaged when it was last opened."""
        scan = self._current_scan()
        damaged = {name: reason for name, stamp in scan.runs.items() if (reason := self._damaged.get(stamp))}
        return {**scan.manifests, **damaged}

    def newest_since_start(self) -> str | None:
        """The newest readable run that has finished since the app was started."""
        scan = self._current_scan().runs
        newer = (name for name in scan if name not in self.initial_names)
        return next((name for name in newer if isinstance(_read_manifest(self.folder / name, scan[name]), Run)), None)

    def readable_names(self) -> list[str]:
        """The names of the runs that can be read, newest first."""
        return [*_readable_names(self.list_runs())]

    def unfinished_jobs(self) -> dict[str, int]:
        """Number of stored cells of each unfinished run."""
        return {run.name: run.stored_jobs for run in self.progress()}

    def progress(self) -> Sequence[RunProgress]:
        """The progress of each unfinished run."""
        return self._current_scan().unfinished

    def fingerprint(self) -> tuple[object, ...]:
        """A value that changes when a run is added, replaced, removed or annotated, or stores a cell."""
        scan = self._current_scan()
        return *scan.runs.values(), *scan.notes, *self.unfinished_jobs().items()

    def table_stamps(self, names: Sequence[str]) -> tuple[FileStamp, ...]:
        """A value that changes when a table of these runs is changed; without names, of those that open first."""
        runs = self._current_scan().runs
        known = [name for name in names or self.default_runs or [*runs][:1] if name in runs]
        return tuple(_file_stamp(file) for name in known for file in sorted((self.folder / name).glob("*.parquet")))

    def open_combined(self, names: Sequence[str]) -> Run:
        """These runs combined; without names the default runs, or the newest one whose tables are complete.

        Raises BadInput for a name that is not in the folder, for an empty folder, and for runs that contradict each
        other; BadRun for a damaged run, and for a folder that holds no other.
        """
        stamps = self._current_scan().runs
        names = list(names) or self.default_runs or self._newest_complete()
        if not names:
            raise BadInput("no finished run in this folder yet. Create a first run: headscope demo")
        if unknown := [name for name in names if name not in stamps]:
            raise BadInput(f"there is no run '{unknown[0]}' in this folder. Open / for the newest run")
        for name in names:
            self._check(name, Run.check)
        return _open_combined(self.folder, tuple(names), tuple(stamps[name] for name in names))

    def _newest_complete(self) -> list[str]:
        """The newest run without a missing or incomplete table, or the newest at all; empty for an empty folder."""
        names = [*self._current_scan().runs]
        for name in names:
            with suppress(BadRun):
                self._check(name, Run.check_footers)
                return [name]
        return names[:1]

    def _check(self, name: str, check: Callable[[Run], None]) -> None:
        """Check a run, and remember if it is damaged. Raises BadRun in that case."""
        stamp = self._current_scan().runs[name]
        self._damaged.pop(stamp, None)
        run = _read_manifest(self.folder / name, stamp)
        try:
            if isinstance(run, BadRun):
                raise run
            check(run)
        except BadRun as reason:
            self._damaged[stamp] = reason
            raise

    def _current_scan(self) -> Scan:
        """What lies in the folder, at most SCAN_SECONDS ago."""
        scan, now = self._scan, time.monotonic()
        changed = _file_stamp(self.folder)[1]
        if scan is None or scan.folder_changed != changed or now - scan.time > SCAN_SECONDS:
            folders = sorted((entry for entry in _entries(self.folder) if not entry.startswith(".")), reverse=True)
            stamps = {name: _file_stamp(self.folder / name / "run.json") for name in folders}
            runs = {name: stamp for name, stamp in stamps.items() if stamp[1]}
            notes = tuple(stamp for name in runs if (stamp := _file_stamp(self.folder / name / NOTES_FILE))[1])
            scan = self._scan = Scan(self.folder, runs, notes, run_progress(self.folder), changed, now)
        return scan


def _readable_names(listing: Mapping[str, Run | BadRun]) -> Iterator[str]:
    return (name for name, run in listing.items() if isinstance(run, Run))


def current_store() -> RunStore:
    """The run store of the app that handles this request."""
    store: RunStore = current_app.config["RUN_STORE"]
    return store


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _file_stamp(file: Path) -> FileStamp:
    """A value that changes when the file is replaced or removed."""
    try:
        status = os.stat(file)
    except OSError:
        return str(file), 0, 0
    return str(file), status.st_mtime_ns, status.st_size


@lru_cache(LISTED_RUNS)
def _read_manifest(folder: Path, stamp: FileStamp) -> Run | BadRun:
    """The run, or why its run.json cannot be read; `stamp` invalidates the cache when the file changes."""
    try:
        return Run.open(folder)
    except BadRun as reason:
        return reason


@lru_cache(CACHED_SELECTIONS)
def _open_combined(folder: Path, names: tuple[str, ...], stamps: tuple[FileStamp, ...]) -> Run:
    """The combined runs; `stamps` invalidate the cache when a run is replaced."""
    return combine_runs([Run.open(folder / name) for name in names])


def run_label(run_name: str) -> str:
    """A run's name without its hash: example, 11-21 13:35."""
    stamp, _, rest = run_name.partition("-")
    if len(stamp) != 16 or not rest:
        return run_name
    slug = rest.rpartition("-")[0] or rest
    return f"{slug}, {stamp[4:6]}-{stamp[6:8]} {stamp[9:11]}:{stamp[11:13]}"
