"""What a study will cost, before it is paid for: seconds, memory and bytes, and how long workers take to share it.

Seconds are taken from a few of its own cells, made here and thrown away, or from a stored run of the same sections.
"""

import heapq
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headscope.errors import BadInput
from headscope.models import loading
from headscope.runs.arrow import Rows
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from headscope.study.config import Study
from headscope.study.context import Materials
from headscope.study.digests import of_files
from headscope.study.executor import POSITIONS, Job, Maker, peak_bytes
from headscope.study.runner import planned
from headscope.study.scheduler import Sharing

LONGEST = 30.0
"""Seconds that one cell may take to time."""
START = 10.0
"""Seconds in which a worker starts and imports what it needs."""
TWICE = 2
"""Each cell is timed so often, and the faster time counts."""


@dataclass(frozen=True)
class Costs:
    """What cells take: `pace` is, by section, the seconds of any cell and of a unit of cost; `factor` is what a model
    multiplies them by; `opening` are the seconds of opening a checkpoint; `bytes` those stored of a cell, by section;
    `peak` the bytes of memory of a process that makes the longest cell."""

    pace: Mapping[str, tuple[float, float]]
    factor: Mapping[str | None, float]
    opening: float
    bytes: Mapping[str, float]
    peak: float

    def seconds(self, job: Job) -> float:
        if job.section == POSITIONS:
            return 0.0
        fixed, each = self.pace[job.section]
        return self.factor.get(job.cell.model, 1.0) * (fixed + each * job.cell.cost)


def plan(study: Study, workers: int, gpus: int, timed: Run | None = None) -> dict[str, Any]:
    """What the study needs, here and with that many workers, on that many GPUs or on this machine's cores.

    Without `timed`, a stored run whose times are taken, some cells are made here. Raises BadInput for a study or a run
    that no plan can be made of.
    """
    maker = Maker(Materials(study))
    jobs = planned(maker)
    checkpoints = {label: maker.materials.checkpoint(label) for label in maker.used}
    threads = torch.get_num_threads()
    of_a_worker = threads if gpus else max(1, (os.cpu_count() or 1) // workers)
    if timed is not None:
        alone = shared = of_run(timed, jobs)
    else:
        alone = shared = calibrated(maker, jobs)
        if of_a_worker != threads:
            torch.set_num_threads(of_a_worker)
            shared = calibrated(maker, jobs)
            torch.set_num_threads(threads)
    crowd = max(1.0, workers / gpus) if gpus else 1.0  # workers of one GPU take turns
    opened = len({*checkpoints.values()})
    span = makespan(jobs, checkpoints, workers, lambda job: crowd * shared.seconds(job), shared.opening, START)
    one = sum(map(alone.seconds, jobs)) + opened * alone.opening
    rows = [
        {
            "checkpoint": checkpoint,
            "models": sum(other == checkpoint for other in checkpoints.values()),
            "cells": len(mine),
            "seconds": round(sum(map(alone.seconds, mine)) + alone.opening, 1),
        }
        for checkpoint, mine in _by_checkpoint(jobs, checkpoints).items()
    ]
    return {
        "checkpoints": rows,
        "cells": len(jobs),
        "seconds_alone": round(one, 1),
        "workers": workers,
        "gpus": gpus,
        "seconds_shared": round(span, 1),
        "speedup": round(one / span, 2) if span else 1.0,
        "bytes_of_a_worker": round(shared.peak),
        "bytes_stored": round(sum(alone.bytes.get(job.section, 0.0) for job in jobs)),
        "from": "cells made here" if timed is None else str(timed.path),
    }


def makespan(
    jobs: Sequence[Job],
    checkpoints: Mapping[str, str],
    workers: int,
    seconds: Callable[[Job], float],
    opening: float = 0.0,
    start: float = 0.0,
) -> float:
    """Seconds until that many workers, each ready after `start`, have made all jobs by the rule that Ray runs by."""
    sharing, last = Sharing(jobs, checkpoints), 0.0
    idle: list[int] = []
    holds: dict[int, str] = {}
    busy: list[tuple[float, int, Job | None]] = [(start, worker, None) for worker in range(workers)]
    while busy:
        clock, freed, job = heapq.heappop(busy)
        if job is not None:
            sharing.done(job)
            last = clock
        waiting, idle = sorted([freed, *idle]), []
        for worker in waiting:
            if (found := sharing.take(worker)) is None:
                idle.append(worker)
                continue
            label = found.cell.model
            wanted = holds.get(worker, "") if label is None else checkpoints[label]
            pause = opening if wanted != holds.get(worker, "") else 0.0
            holds[worker] = wanted
            heapq.heappush(busy, (clock + pause + seconds(found), worker, found))
    return last


def calibrated(maker: Maker, jobs: Sequence[Job]) -> Costs:
    """Costs by the first cells of each section, and by the first of all for every kind of model."""
    with TemporaryDirectory() as aside, RunWriter.open(Path(aside), "plan", {}) as writer:
        maker.materials.files = writer.files
        timing = _Timing(maker, writer)
        kinds = _kinds(maker)
        pace, sizes, alike = {}, {}, [job for job in jobs if job.section != POSITIONS and not job.needs]
        for section in dict.fromkeys(job.section for job in alike):
            mine = [job for job in alike if job.section == section]
            of_one = [job for job in mine if kinds.get(job.cell.model) == kinds.get(mine[0].cell.model)]
            pace[section] = timing.pace(of_one)
            sizes[section] = timing.bytes
        factor: dict[str | None, float] = {}
        firsts = {kind: next(j for j in alike if kinds.get(j.cell.model) == kind) for kind in {*kinds.values()}}
        reference = alike[0]
        for kind, job in firsts.items():
            same = kind == kinds.get(reference.cell.model)
            fixed, each = pace[job.section]
            known = fixed + each * job.cell.cost
            ratio = 1.0 if same or not known else timing.seconds(job) / known
            factor |= {label: ratio for label in maker.used if kinds[label] == kind}
        longest = max(_tokens(job.cell.cost) for job in alike)
        for job in jobs:  # a section all of whose cells read others has none to time
            pace.setdefault(job.section, next(iter(pace.values())))
        return Costs(pace, factor, timing.opening, sizes, timing.peak(longest))


def of_run(run: Run, jobs: Sequence[Job]) -> Costs:
    """Costs as a stored run tells them. Raises BadInput where it tells none of a section."""
    spent = run.manifest.get("spent", {})
    made = spent.get("made", [])
    pace: dict[str, tuple[float, float]] = {}
    for section in dict.fromkeys(job.section for job in jobs if job.section != POSITIONS):
        mine = [row for row in made if row["section"] == section]
        if not sum(row["cost"] for row in mine):
            raise BadInput(f"{run.path} tells no times of '{section}': give a run that was made in one go, or none")
        pace[section] = (0.0, sum(row["seconds"] for row in mine) / sum(row["cost"] for row in mine))
    factor: dict[str | None, float] = {}
    for label in {row["model"] for row in made}:
        mine = [row for row in made if row["model"] == label and row["section"] in pace]
        expected = sum(pace[row["section"]][1] * row["cost"] for row in mine)
        if expected:
            factor[label] = sum(row["seconds"] for row in mine) / expected
    opened = len({model["checkpoint"] for model in run.manifest["models"]})
    cells = sum(row["cells"] for row in made)
    stored = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
    return Costs(pace, factor, spent["opening"] / opened, dict.fromkeys(pace, stored / cells), spent["peak"])


class _Timing:
    """Makes cells to time them."""

    def __init__(self, maker: Maker, writer: RunWriter) -> None:
        self.maker, self.writer = maker, writer
        self.opening, self.bytes = 0.0, 0.0
        self._warm, self._stored_cells = False, 0
        self._peaks: list[tuple[int, float]] = []

    def seconds(self, job: Job) -> float:
        """Of one cell."""
        if not self._warm:  # the first pass of a process pays for page faults and thread pools
            self.opening, self._warm = self.maker.make(job).opening, True
        made = [self.maker.make(job) for _ in range(TWICE)]
        self.bytes = max(self.bytes, self._stored(made[0].rows))
        self._peaks.append((_tokens(job.cell.cost), peak_bytes()))
        return min(each.seconds for each in made)

    def _stored(self, rows: Mapping[str, Rows]) -> int:
        """Bytes of a cell's tables on disk."""
        self._stored_cells += 1
        cell = f"timed {self._stored_cells}"
        self.writer.add(cell, rows)
        return self.writer.size(cell)

    def pace(self, jobs: Sequence[Job]) -> tuple[float, float]:
        """Seconds of any of these cells, and of a unit of their cost."""
        self.bytes = 0.0
        first = jobs[0]
        took = self.seconds(first)
        most = first.cell.cost * LONGEST / max(took, 1e-9)
        longer = [job for job in jobs if first.cell.cost * 1.5 < job.cell.cost < most]
        if not longer:
            return 0.0, took / max(first.cell.cost, 1e-9)
        other = max(longer, key=lambda job: job.cell.cost)
        each = max((self.seconds(other) - took) / (other.cell.cost - first.cell.cost), 0.0)
        return max(took - each * first.cell.cost, 0.0), each

    def peak(self, longest: int) -> float:
        """Bytes of memory at that many tokens, by what the timed cells needed."""
        (short, less), (long, more) = min(self._peaks), max(self._peaks)
        return more + (more - less) / (long - short) * max(longest - long, 0) if long > short else more


def _kinds(maker: Maker) -> dict[str | None, str]:
    """Models whose cells take alike: of one configuration, under one kind of scheme."""
    kinds: dict[str | None, str] = {}
    for label in maker.used:
        spec = maker.materials.specs[label]
        folder = Path(loading.locate(loading.split(spec.checkpoint)[0])[0])
        kinds[label] = f"{of_files([folder / 'config.json'])} {type(spec.rule).__name__}"
    return kinds


def _by_checkpoint(jobs: Sequence[Job], checkpoints: Mapping[str, str]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault("none" if job.cell.model is None else checkpoints[job.cell.model], []).append(job)
    return found


def _tokens(cost: float) -> int:
    """Tokens of one pass that costs that much: the inverse of `pass_cost`."""
    return round(2048 * (math.sqrt(1 + cost / 1024) - 1))
