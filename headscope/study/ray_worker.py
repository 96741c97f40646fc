"""A worker: makes cells in a process of its own, perhaps on another machine. It knows nothing of Ray, which runs it."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from headscope.study.config import build_study
from headscope.study.context import Materials
from headscope.study.executor import Job, Made, Maker, hardware

Told = tuple[float, str]
"""Progress within a long cell: what is done, in units of cost, or what is being done."""
Warned = tuple[int, str]
"""A line for the log, with its level."""


class Hand:
    """One worker, with one checkpoint in memory at a time.

    `place` is the folder that a study's relative paths are of, `files` where a section keeps what no table holds:
    folders of the process that hands out, on a disk that all nodes share if there are several.
    """

    def __init__(self, study: Mapping[str, Any], used: Sequence[str], threads: int, place: Path, files: Path) -> None:
        torch.set_num_threads(threads)
        if place.is_dir():
            os.chdir(place)  # what a study names by a relative path
        self._study, self._used, self._files = study, used, files
        self._telling: SimpleQueue[Told] = SimpleQueue()
        self._warned: list[Warned] = []
        self._maker: Maker | None = None
        self._known: set[str] = set()
        logging.getLogger("headscope").addHandler(_Listener(self._warned))

    def ready(self) -> dict[str, Any]:
        """What it runs on."""
        return hardware()

    def make(self, job: Job, stored: Mapping[tuple[str, str], Any]) -> tuple[Made, list[Warned]]:
        """What comes of a job that reads these tables of others, by job and name, and what it warns of."""
        maker = self._opened()
        materials = maker.materials
        materials.stored = lambda cell, table: stored[cell, table]
        label = job.cell.model
        if label is not None and label not in self._known:
            materials.identify(label)
            self._known.add(label)
        self._warned.clear()
        return maker.make(job), [*self._warned]

    def tells(self) -> list[Told]:
        """The progress within a long cell, once there is some: what was done and what is being done."""
        told = [self._telling.get()]
        while not self._telling.empty():
            told.append(self._telling.get())
        return told

    def _opened(self) -> Maker:
        if self._maker is None:
            materials = Materials(build_study(self._study), progress=_Teller(self._telling), files=self._files)
            self._maker = Maker(materials)
            self._maker.used = self._used
        return self._maker


class _Teller:
    """Progress that is told to the driver."""

    def __init__(self, telling: SimpleQueue[Told]) -> None:
        self._telling = telling

    def start(self, total: float, already: float) -> None: ...

    def doing(self, what: str, worker: str = "") -> None:
        self._telling.put((0.0, what))

    def done(self, cost: float) -> None:
        self._telling.put((cost, ""))

    def stop(self) -> None: ...


class _Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, heard: list[Warned]) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append((record.levelno, record.getMessage()))
