"""The runs of one folder, opened by name. A name is looked up in the folder's listing, never joined to a path."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from flask import current_app

from headscope.errors import BadInput, BadRun
from headscope.runs.run import Run, concatenate, runs, unfinished

CACHED_SELECTIONS = 8
"""Selections whose tables are kept in memory."""


class RunStore:
    """What lies in a folder now; runs that finish later appear by themselves.

    `place` is the folder, or one of its runs: then `first`, which is shown where none is named.
    """

    def __init__(self, path: Path) -> None:
        is_run = (path / "run.json").is_file()
        self.folder = path.parent if is_run else path
        self.default_run = path.name if is_run else ""
        self.initial_names = {*self.list_runs()}

    def list_runs(self) -> dict[str, Run | BadRun]:
        """Every finished run by name, newest first; one that cannot be read comes with the reason."""
        return {path.name: found for path, found in runs(self.folder)}

    def newest_since_start(self) -> str | None:
        """The newest run that can be read and was not there when the app was started."""
        return next((name for name in _readable_names(self.list_runs()) if name not in self.initial_names), None)

    def unfinished_cells(self) -> dict[str, int]:
        """Cells stored so far of each run that was interrupted or is still going on."""
        return unfinished(self.folder)

    def fingerprint(self) -> tuple[object, ...]:
        """What changes when a run is added, replaced, removed or goes on."""
        finished = ((file.parent.name, file.stat().st_mtime_ns) for file in self.folder.glob("*/run.json"))
        return *sorted(finished), *self.unfinished_cells().items()

    def open_combined(self, names: Sequence[str]) -> Run:
        """These runs read as one; without a name `first`, or the newest that can be read.

        Raises BadInput for a name that is not in the folder, for none at all, and for runs that contradict each other;
        BadRun for a damaged one.
        """
        found = self.list_runs()
        names = list(names) or ([self.default_run] if self.default_run else [*_readable_names(found)][:1])
        if not names:
            raise BadInput("there is no finished run in this folder yet")
        if unknown := [name for name in names if name not in found]:
            raise BadInput(f"there is no run '{unknown[0]}' in this folder")
        if broken := [run for name in names if isinstance(run := found[name], BadRun)]:
            raise broken[0]
        stamps = tuple((self.folder / name / "run.json").stat().st_mtime_ns for name in names)
        return _open_checked(self.folder, tuple(names), stamps)


def _readable_names(listing: Mapping[str, Run | BadRun]) -> Iterator[str]:
    return (name for name, run in listing.items() if isinstance(run, Run))


def current_store() -> RunStore:
    """The library of the app that answers this request."""
    found: RunStore = current_app.config["LIBRARY"]
    return found


@lru_cache(CACHED_SELECTIONS)
def _open_checked(folder: Path, names: tuple[str, ...], modified_times: tuple[int, ...]) -> Run:
    """The runs as one, every table checked; `stamps` make a run that was replaced a new one."""
    run = concatenate([Run.open(folder / name) for name in names])
    run.check()
    return run
