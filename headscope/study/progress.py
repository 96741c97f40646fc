"""Progress of long work: a bar with an estimate on a terminal, plain lines elsewhere, nothing when quiet."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

MIN_SECONDS = 5
"""The time left is estimated once this time has passed since the first completed work, and more is completed."""
SECONDS_BETWEEN_LINES = 10
"""Within a long job, a line is printed after this time, whether the job reports progress or not."""
LONG_SECONDS = 60
"""Work that is expected to take longer is announced as soon as its time can be estimated."""


class Progress(Protocol):
    """Receives the progress of a study, in units of cost."""

    def start(self, total: float, completed: float) -> None:
        """Begin with `completed` of `total` done."""

    def set_activity(self, activity: str, worker: str = "") -> None:
        """Say what is being done, and on which worker if there are several."""

    def advance(self, cost: float) -> None:
        """Add `cost` to what is done."""

    def extend(self, cost: float) -> None:
        """Add `cost` to what there is to do."""

    def stop(self) -> None: ...


class NoProgress:
    """Shows nothing."""

    def start(self, total: float, completed: float) -> None: ...

    def set_activity(self, activity: str, worker: str = "") -> None: ...

    def advance(self, cost: float) -> None: ...

    def extend(self, cost: float) -> None: ...

    def stop(self) -> None: ...


class ProgressBar:
    """A live bar on standard error."""

    def __init__(self) -> None:
        columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), TextColumn("left"))
        self._bar = Bar(
            *columns,
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("starting")
        self._activities: dict[str, str] = {}

    def start(self, total: float, completed: float) -> None:
        self._bar.update(self._task, total=max(total, 1e-9), completed=completed)
        self._bar.start()

    def set_activity(self, activity: str, worker: str = "") -> None:
        self._activities[worker] = _activity_text(activity, worker)
        self._bar.update(self._task, description="\n".join(self._activities.values()))

    def advance(self, cost: float) -> None:
        self._bar.advance(self._task, cost)

    def extend(self, cost: float) -> None:
        self._bar.update(self._task, total=(self._bar.tasks[0].total or 0.0) + cost)

    def stop(self) -> None:
        self._bar.stop()


class ProgressLines:
    """Lines on standard error: the completed share, the activity and the estimated time left.

    One line per job, and more within a job that takes long; before them, once, the expected time of long work, and,
    if `can_resume`, that an interruption keeps what is finished.
    """

    def __init__(self, can_resume: bool = True) -> None:
        self._hint = " Ctrl-C keeps what is finished." if can_resume else ""

    def start(self, total: float, completed: float) -> None:
        self._total, self._completed = max(total, 1e-9), completed
        self._start_time = self._line_time = time.monotonic()
        self._origin: tuple[float, float] | None = None
        """Time and completed work at the first progress: opening the model, before it, says nothing about the rest."""
        self._activity, self._is_announced = "opening the model", False
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def set_activity(self, activity: str, worker: str = "") -> None:
        self._activity = _activity_text(activity, worker)
        self._print_line()

    def advance(self, cost: float) -> None:
        self._completed += cost
        self._origin = self._origin or (time.monotonic(), self._completed)
        if not self._is_announced and (seconds := self._seconds_left()) is not None:
            self._is_announced = True
            if seconds > LONG_SECONDS:
                print(f"This takes about {_duration(seconds)}.{self._hint}", file=sys.stderr)
        self.print_if_due()

    def extend(self, cost: float) -> None:
        self._total += cost

    def stop(self) -> None:
        self._stopped.set()

    def print_if_due(self) -> None:
        """Print a line if the last one is old."""
        if time.monotonic() - self._line_time > SECONDS_BETWEEN_LINES:
            self._print_line()

    def _watch(self) -> None:
        """Print lines within jobs that report no progress themselves."""
        while not self._stopped.wait(1):
            self.print_if_due()

    def _print_line(self) -> None:
        self._line_time = time.monotonic()
        seconds = self._seconds_left()
        elapsed = self._line_time - self._start_time
        time_left = f"  (about {_duration(seconds)} left)" if seconds else ""
        if seconds is None and elapsed > SECONDS_BETWEEN_LINES:
            time_left = f"  (for {_duration(elapsed)}; the time left is not known yet)"
        print(f"{100 * self._completed / self._total:3.0f} %  {self._activity}{time_left}", file=sys.stderr, flush=True)

    def _seconds_left(self) -> float | None:
        """The estimated time left; None if it is too early to estimate it."""
        if self._origin is None:
            return None
        elapsed, newly_completed = time.monotonic() - self._origin[0], self._completed - self._origin[1]
        if newly_completed <= 0 or elapsed < MIN_SECONDS:
            return None
        return elapsed * max(self._total - self._completed, 0) / newly_completed


def console_progress(quiet: bool, can_resume: bool = True) -> Progress:
    """The progress display that suits standard error, of work that can be resumed or not."""
    if quiet:
        return NoProgress()
    return ProgressBar() if sys.stderr.isatty() else ProgressLines(can_resume)


@contextmanager
def hide_progress_bars(is_hidden: bool) -> Iterator[None]:
    """Hide the progress bars of transformers ("Loading weights") inside the block."""
    from transformers.utils import logging

    must_restore = is_hidden and logging.is_progress_bar_enabled()
    if must_restore:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if must_restore:
            logging.enable_progress_bar()


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def _activity_text(activity: str, worker: str) -> str:
    return f"{worker}: {activity}" if worker else activity
