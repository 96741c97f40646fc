"""The runs of one folder, opened by name. A name is looked up in the folder's listing, never joined to a path."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from flask import current_app

from headscope.errors import BadInput, BadRun, CannotWrite
from headscope.runs.notes import NOTES_FILE
from headscope.runs.run import Run, RunProgress, combine_runs, list_runs, run_progress, unfinished_runs

READ_ONLY_REASON = (
    "this app writes nothing, because it shows the shipped runs or was started with --read-only. Start it on a folder "
    "of your own: headscope dash RUNS_DIR"
)
CACHED_SELECTIONS = 8
"""Combinations of runs whose tables are kept in memory."""


FileStamp = tuple[str, int, int]
"""Path, modification time and size of a file."""


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
        self.initial_names = {*self.list_runs()}

    def writable_folder(self) -> Path:
        """The folder, for the app to write to. Raises CannotWrite if it is read-only."""
        if self.is_read_only:
            raise CannotWrite(READ_ONLY_REASON)
        return self.folder

    def list_runs(self) -> dict[str, Run | BadRun]:
        """Every finished run by name, newest first; an error for a run that cannot be read or lacks part of a table."""
        files = sorted(file for file in self.folder.glob("[!.]*/*") if file.suffix in (".json", ".parquet"))
        return _list_checked(self.folder, tuple(_file_stamp(file) for file in files))

    def newest_since_start(self) -> str | None:
        """The newest readable run that has finished since the app was started."""
        return next((name for name in self.readable_names() if name not in self.initial_names), None)

    def readable_names(self) -> list[str]:
        """The names of the runs that can be read, newest first."""
        return [*_readable_names(self.list_runs())]

    def unfinished_jobs(self) -> dict[str, int]:
        """Number of stored cells of each unfinished run."""
        return unfinished_runs(self.folder)

    def progress(self) -> list[RunProgress]:
        """The progress of each unfinished run."""
        return run_progress(self.folder)

    def fingerprint(self) -> tuple[object, ...]:
        """A value that changes when a run is added, replaced, removed or annotated, or stores a cell."""
        finished = (_file_stamp(file) for name in ("run.json", NOTES_FILE) for file in self.folder.glob(f"*/{name}"))
        return *sorted(finished), *self.unfinished_jobs().items()

    def open_combined(self, names: Sequence[str]) -> Run:
        """These runs combined; without names the default runs, or the newest readable one.

        Raises BadInput for a name that is not in the folder, for an empty folder, and for runs that contradict each
        other; BadRun for a damaged run, and for a folder that holds no other.
        """
        listing = self.list_runs()
        names = list(names) or self.default_runs or [*_readable_names(listing), *listing][:1]
        if not names:
            raise BadInput("no finished run in this folder yet. Create a first run: headscope demo")
        if unknown := [name for name in names if name not in listing]:
            raise BadInput(f"there is no run '{unknown[0]}' in this folder. Open / for the newest run")
        if damaged := [run for name in names if isinstance(run := listing[name], BadRun)]:
            raise damaged[0]
        stamps = tuple(_file_stamp(self.folder / name / "run.json") for name in names)
        return _open_checked(self.folder, tuple(names), stamps)


def _readable_names(listing: Mapping[str, Run | BadRun]) -> Iterator[str]:
    return (name for name, run in listing.items() if isinstance(run, Run))


def current_store() -> RunStore:
    """The run store of the app that handles this request."""
    store: RunStore = current_app.config["RUN_STORE"]
    return store


def _file_stamp(file: Path) -> FileStamp:
    """A value that changes when the file is replaced or removed."""
    try:
        status = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), status.st_mtime_ns, status.st_size


@lru_cache(2)
def _list_checked(folder: Path, stamps: tuple[FileStamp, ...]) -> dict[str, Run | BadRun]:
    """The runs of the folder, damaged ones as errors; `stamps` invalidate the cache when a file changes."""
    return {path.name: _check_footers(run) for path, run in list_runs(folder)}


def _check_footers(run: Run | BadRun) -> Run | BadRun:
    try:
        if isinstance(run, Run):
            run.check_footers()
    except BadRun as reason:
        return reason
    return run


@lru_cache(CACHED_SELECTIONS)
def _open_checked(folder: Path, names: tuple[str, ...], stamps: tuple[FileStamp, ...]) -> Run:
    """The combined runs, every table checked; `stamps` invalidate the cache when a run is replaced."""
    run = combine_runs([Run.open(folder / name) for name in names])
    run.check()
    return run
