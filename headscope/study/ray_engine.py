"""Cells made by workers of Ray: processes with one opened checkpoint each, on this machine or on a cluster.

This process plans, hands out (`headscope.study.scheduler`) and alone stores what comes back. A worker that dies costs
its cell another try, by another worker; a cell that nobody survives is named at the end, with all others stored.
"""

import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headscope.errors import BadInput, Changed, Interrupted, Missing
from headscope.study.config import Engine
from headscope.study.executor import Job, Made, Maker, Work
from headscope.study.progress import Progress
from headscope.study.ray_cluster import Room, cluster
from headscope.study.ray_worker import Hand
from headscope.study.scheduler import Sharing

log = logging.getLogger("headscope")

TRIES = 3
"""How often a cell is begun before it is given up."""
PATIENCE = 300.0
"""Seconds in which some worker starts, or none can."""


class OnRay:
    """The engine `ray`. Raises Missing where Ray is not installed."""

    def __init__(self, wanted: Engine) -> None:
        if importlib.util.find_spec("ray") is None:
            raise Missing("Ray is not installed: pip install 'headscope[ray]', or leave out --engine ray")
        self.wanted = wanted
        self.told: Mapping[str, Any] = {}

    def make(self, jobs: Sequence[Job], maker: Maker, progress: Progress) -> Work:
        materials = maker.materials
        if materials.given:
            raise BadInput(
                f"model '{min(materials.given)}' is in memory, out of workers' reach: save it, give its folder"
            )
        if jobs:
            with cluster(self.wanted, materials.study.device) as room:
                crew = _Crew(jobs, maker, room, progress)
                try:
                    yield from crew.work()
                finally:
                    self.told = {"workers": crew.seen}
                    crew.leave()


@dataclass(eq=False)
class _Worker:
    number: int
    actor: Any
    job: Job | None = None
    waits: dict[Any, str] = field(default_factory=dict)
    """What is asked of it, by what it is: ready, make or tells."""


class _Crew:
    """The workers of a study, and what each is doing."""

    def __init__(self, jobs: Sequence[Job], maker: Maker, room: Room, progress: Progress) -> None:
        materials = maker.materials
        checkpoints = {label: materials.checkpoint(label) for label in maker.used}
        others = {need for job in jobs for need in job.needs} - {job.id for job in jobs}
        self.sharing = Sharing(jobs, checkpoints, others)
        self.maker, self.room, self.progress = maker, room, progress
        self.seen: list[dict[str, Any]] = []
        self._tries: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._failures = 0
        self._workers = [self._start(number) for number in range(1, room.workers + 1)]

    def work(self) -> Work:
        """Every job that can be done, as it is done. Raises Interrupted at the end where some could not."""
        import ray

        began = time.monotonic()
        while True:
            for worker in self._workers:
                if worker.job is None and "ready" not in worker.waits.values():
                    self._hand_out(worker)
            if not self.sharing.left and not any(worker.job for worker in self._workers):
                break
            waits = {ref: worker for worker in self._workers for ref in worker.waits}
            came, _ = ray.wait(list(waits), timeout=1.0)
            for ref in came:
                began = time.monotonic()
                yield from self._heard(waits[ref], ref)
            idle = all("ready" in worker.waits.values() for worker in self._workers)
            if idle and time.monotonic() - began > PATIENCE:
                raise BadInput(
                    f"no worker started in {PATIENCE:.0f} s: each needs {self.room.cpus} cores and {self.room.gpus:g} "
                    "GPUs that nobody else uses; finished cells are kept: add --resume"
                )
        if self._lost:
            kept, names = self.maker.materials.files.parent, ", ".join(f"'{name}'" for name in self._lost)
            reason = next(iter(self._lost.values()))
            raise Interrupted(
                f"no worker survived {names} ({reason}); all other cells are kept in {kept}: "
                "give a worker more memory, then add --resume"
            )

    def leave(self) -> None:
        """End every worker."""
        import ray

        for worker in self._workers:
            ray.kill(worker.actor)

    def _start(self, number: int) -> _Worker:
        import ray

        materials, room = self.maker.materials, self.room
        study = materials.study.model_dump(mode="json", exclude_none=True)
        # Two groups of threads: what a worker tells of a long cell is heard while it is made.
        wants = {"num_cpus": room.cpus, "num_gpus": room.gpus, "max_restarts": 0, "concurrency_groups": {"aside": 1}}
        hand: Any = ray.remote(**wants)(Hand)
        actor = hand.remote(study, self.maker.used, room.cpus, Path.cwd(), materials.files.absolute())
        worker = _Worker(number, actor)
        worker.waits[actor.ready.remote()] = "ready"
        worker.waits[actor.tells.options(concurrency_group="aside").remote()] = "tells"
        return worker

    def _hand_out(self, worker: _Worker) -> None:
        job = self.sharing.take(worker.number)
        if job is not None:
            stored = {(need, table): frame for need in job.needs for table, frame in self._stored(need)}
            self.progress.doing(job.cell.id, self._name(worker))
            worker.job = job
            worker.waits[worker.actor.make.remote(job, stored)] = "make"

    def _stored(self, job: str) -> Iterator[tuple[str, Any]]:
        materials = self.maker.materials
        return ((table, materials.stored(job, table)) for table in materials.tables(job))

    def _heard(self, worker: _Worker, ref: Any) -> Work:
        """Take in what a worker answers."""
        import ray

        what = worker.waits.pop(ref, "")
        if not what:
            return  # it died meanwhile, as another answer told
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # a mistake in the study or of the measure, as it is without Ray
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from error
        except ray.exceptions.RayError as error:
            self._died(worker, error)
            return
        if what == "ready":
            self._failures = 0
            self.seen.append(answer)
        elif what == "tells":
            for cost, said in answer:
                if said:
                    self.progress.doing(said, self._name(worker))
                self.progress.done(cost)
            worker.waits[worker.actor.tells.options(concurrency_group="aside").remote()] = "tells"
        elif worker.job is not None:
            job, worker.job = worker.job, None
            made, warned = answer
            for level, line in warned:
                log.log(level, line)
            self._compare(made)
            yield job, made
            self.sharing.done(job)

    def _died(self, worker: _Worker, error: Exception) -> None:
        """Put another in the place of a worker; its job is for any."""
        import ray

        ray.kill(worker.actor)  # it may only be out of reach
        reason, job = " ".join(str(error).partition("class_name")[0].split())[:200], worker.job
        log.warning("%s died%s: %s", self._name(worker), f" at {job.cell.id}" if job else "", reason)
        self.sharing.gone(worker.number, job)
        if job is None:
            self._failures += 1
        else:
            self._tries[job.id] = self._tries.get(job.id, 0) + 1
            if self._tries[job.id] == TRIES:
                self._lost |= {each.cell.id: reason for each in self.sharing.give_up(job)}
        if self._failures > TRIES * self.room.workers:
            raise Missing(f"workers die before they begin: {reason}")
        worker.waits.clear()
        self._workers[self._workers.index(worker)] = self._start(worker.number)

    def _compare(self, made: Made) -> None:
        """Raises Changed where a worker read something else than this process has."""
        for label, told in made.inputs.items():
            known = self.maker.materials.inputs[label]
            if other := [what for what, digest in told.items() if known.get(what, digest) != digest]:
                whose = f" of '{label}'" if label is not None else ""
                same = "say --dtype fp32 or bf16" if other[0] == "dtype" else "give all nodes the same files"
                raise Changed(f"a worker reads another {other[0]}{whose} than the rest: {same}")
            known |= told

    def _name(self, worker: _Worker) -> str:
        return f"worker {worker.number} of {self.room.workers}"
