"""Progress of long work: a bar with an estimate on a terminal, plain lines elsewhere, nothing when quiet."""

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    """Told of the work in units of cost: start(total, already done), doing(what, which worker), done(cost), stop()."""

    def start(self, total: float, already: float) -> None: ...

    def doing(self, what: str, worker: str = "") -> None: ...

    def done(self, cost: float) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, total: float, already: float) -> None: ...

    def doing(self, what: str, worker: str = "") -> None: ...

    def done(self, cost: float) -> None: ...

    def stop(self) -> None: ...


class Terminal:
    """A live bar on standard error."""

    def __init__(self) -> None:
        columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(), TextColumn("left"))
        self._bar = Bar(
            *columns,
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("starting")
        self._doing: dict[str, str] = {}

    def start(self, total: float, already: float) -> None:
        self._bar.update(self._task, total=max(total, 1e-9), completed=already)
        self._bar.start()

    def doing(self, what: str, worker: str = "") -> None:
        self._doing[worker] = _said(what, worker)
        self._bar.update(self._task, description="\n".join(self._doing.values()))

    def done(self, cost: float) -> None:
        self._bar.advance(self._task, cost)

    def stop(self) -> None:
        self._bar.stop()


class Lines:
    """One line a cell on standard error, with the share done and an estimate of what is left."""

    def start(self, total: float, already: float) -> None:
        self._total, self._at, self._first = max(total, 1e-9), already, already
        self._began = time.monotonic()

    def doing(self, what: str, worker: str = "") -> None:
        print(f"{self._at / self._total:4.0%}  {_said(what, worker)}{self._left()}", file=sys.stderr, flush=True)

    def done(self, cost: float) -> None:
        self._at += cost

    def stop(self) -> None: ...

    def _left(self) -> str:
        moved = self._at - self._first
        if moved <= 0:
            return ""
        seconds = (time.monotonic() - self._began) * (self._total - self._at) / moved
        return f"  (about {seconds / 60:.0f} min left)" if seconds > 90 else f"  (about {seconds:.0f} s left)"


def _said(what: str, worker: str) -> str:
    return f"{worker}: {what}" if worker else what


def for_console(quiet: bool) -> Progress:
    """The progress that suits standard error."""
    if quiet:
        return Silent()
    return Terminal() if sys.stderr.isatty() else Lines()
