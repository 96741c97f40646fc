"""Estimates what a study will cost: seconds, memory and disk space here, and how long workers would take together.

Times come from a few of its own jobs, run here and thrown away, or from a stored run of the same probes.
"""

import heapq
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headscope.errors import BadInput
from headscope.models import loading
from headscope.runs.run import Run
from headscope.study.cells import Job
from headscope.study.config import Study
from headscope.study.context import StudyContext
from headscope.study.digests import digest_files
from headscope.study.executor import JobExecutor, JobResult, peak_bytes, runs_always
from headscope.study.progress import NoProgress, Progress
from headscope.study.scheduler import Scheduler
from headscope.study.stored_size import StoredSize

MAX_JOB_SECONDS = 30.0
"""Longest time that one timed job may take."""
WORKER_START_SECONDS = 10.0
"""Time in which a worker starts and imports its libraries."""
REPEATS = 2
"""Each job is timed this often, after a first pass of the process; the faster time counts. A job that takes longer than
`MAX_JOB_SECONDS` runs once."""


@dataclass(frozen=True)
class CostModel:
    """Predicts the cost of jobs. Probes are keyed by `Job.probe`.

    `rates` are (seconds per job, seconds per unit of cost) by probe; `model_factors` multiply them by model label;
    `opening_seconds` open a checkpoint; `stored_bytes` are written per job, by probe, and `commit_seconds` merge the
    tables at the end; `peak_bytes` is the memory of a process that runs the longest job.
    """

    rates: Mapping[str, tuple[float, float]]
    model_factors: Mapping[str, float]
    opening_seconds: float
    stored_bytes: Callable[[Sequence[Job]], float]
    commit_seconds: Callable[[Sequence[Job]], float]
    peak_bytes: float

    def seconds(self, job: Job) -> float:
        """Predicted seconds of a job."""
        if runs_always(job):
            return 0.0
        fixed, per_cost = self.rates[job.probe]
        return self.model_factors.get(job.model, 1.0) * (fixed + per_cost * job.cost)


def plan_study(
    study: Study, workers: int, gpus: int, timed_run: Run | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Predict the cost of a study in this process and on `workers` workers, on `gpus` GPUs or this machine's cores.

    Times come from `timed_run`, or from jobs that are run here. Raises BadInput for a study or a run that cannot be
    planned from.
    """
    executor = JobExecutor(StudyContext(study))
    jobs = executor.plan()
    checkpoints = {label: executor.context.checkpoint_name(label) for label in executor.used_labels}
    threads = torch.get_num_threads()
    threads_per_worker = threads if gpus else max(1, (os.cpu_count() or 1) // workers)
    if timed_run is not None:
        local = distributed = costs_of_run(timed_run, jobs)
    else:
        local, distributed = _measure_process_and_worker_costs(
            executor, jobs, threads_per_worker, progress or NoProgress()
        )
    sharing = max(1.0, workers / gpus) if gpus else 1.0  # workers on one GPU take turns

    def worker_seconds(job: Job) -> float:
        return sharing * distributed.seconds(job)

    opening = distributed.opening_seconds
    distributed_seconds = makespan(jobs, checkpoints, workers, worker_seconds, opening, WORKER_START_SECONDS)
    local_seconds = sum(map(local.seconds, jobs)) + len({*checkpoints.values()}) * local.opening_seconds
    commit_seconds = local.commit_seconds(jobs)  # by the process that started the study, in both cases
    local_seconds, distributed_seconds = local_seconds + commit_seconds, distributed_seconds + commit_seconds
    rows = [
        {
            "checkpoint": checkpoint,
            "models": sum(other == checkpoint for other in checkpoints.values()),
            "cells": len(own_jobs),
            "seconds": round(sum(map(local.seconds, own_jobs)) + local.opening_seconds, 1),
        }
        for checkpoint, own_jobs in _by_checkpoint(jobs, checkpoints).items()
    ]
    return {
        "checkpoints": rows,
        "cells": len(jobs),
        "seconds_alone": round(local_seconds, 1),
        "seconds_commit": round(commit_seconds, 1),
        "workers": workers,
        "gpus": gpus,
        "seconds_shared": round(distributed_seconds, 1),
        "speedup": round(local_seconds / distributed_seconds, 2) if distributed_seconds else 1.0,
        "bytes_of_a_worker": round(distributed.peak_bytes),
        "bytes_stored": round(local.stored_bytes(jobs)),
        "from": "measurements on this machine" if timed_run is None else str(timed_run.path),
    }


def makespan(
    jobs: Sequence[Job],
    checkpoints: Mapping[str, str],
    workers: int,
    job_seconds: Callable[[Job], float],
    opening_seconds: float = 0.0,
    start_seconds: float = 0.0,
) -> float:
    """Seconds until `workers` workers have run all jobs in the order in which the Ray engine assigns them."""
    scheduler, finished = Scheduler(jobs, checkpoints), 0.0
    idle: list[int] = []
    open_checkpoints: dict[int, str] = {}
    events: list[tuple[float, int, Job | None]] = [(start_seconds, worker, None) for worker in range(workers)]
    while events:
        clock, free_worker, finished_job = heapq.heappop(events)
        if finished_job is not None:
            scheduler.finish(finished_job)
            finished = clock
        waiting, idle = sorted([free_worker, *idle]), []
        for worker in waiting:
            if (job := scheduler.next_job(worker)) is None:
                idle.append(worker)
                continue
            loaded_checkpoint = open_checkpoints.get(worker, "")
            needed = checkpoints[job.model] if job.model else loaded_checkpoint
            pause = opening_seconds if needed != loaded_checkpoint else 0.0
            open_checkpoints[worker] = needed
            heapq.heappush(events, (clock + pause + job_seconds(job), worker, job))
    return finished


def _measure_process_and_worker_costs(
    executor: JobExecutor, jobs: Sequence[Job], threads_per_worker: int, progress: Progress
) -> tuple[CostModel, CostModel]:
    """Costs with the threads of this process and with those of a worker."""
    threads = torch.get_num_threads()
    thread_counts = dict.fromkeys((threads, threads_per_worker))
    progress.start(len(thread_counts) * _timed_cost(executor, jobs), 0)
    try:
        costs = []
        for count in thread_counts:
            torch.set_num_threads(count)
            costs.append(measure_costs(executor, jobs, progress))
    finally:
        torch.set_num_threads(threads)
        progress.stop()
    return costs[0], costs[-1]


def _timeable_jobs(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if not runs_always(job) and not job.prerequisites]


def _timed_cost(executor: JobExecutor, jobs: Sequence[Job]) -> float:
    """The cost of the jobs that `measure_costs` certainly runs; a longer one of each probe may be added."""
    timeable, kinds = _timeable_jobs(jobs), _model_kinds(executor)
    first_of_probe = {job.probe: job for job in reversed(timeable)}
    other_kinds = {kinds.get(job.model): job for job in reversed(timeable)}
    other_kinds.pop(kinds.get(timeable[0].model))
    return timeable[0].cost + REPEATS * sum(job.cost for job in (*first_of_probe.values(), *other_kinds.values()))


def measure_costs(executor: JobExecutor, jobs: Sequence[Job], progress: Progress | None = None) -> CostModel:
    """Time the first jobs of each probe, and one job of every kind of model."""
    with TemporaryDirectory() as folder:
        executor.context.files_folder = Path(folder) / "plan" / "files"
        executor.context.files_folder.mkdir(parents=True)
        timer = _Timer(executor, progress or NoProgress())
        kinds = _model_kinds(executor)
        rates: dict[str, tuple[float, float]] = {}
        timeable = _timeable_jobs(jobs)
        for probe in dict.fromkeys(job.probe for job in timeable):
            own_jobs = [job for job in timeable if job.probe == probe]
            same_kind = [job for job in own_jobs if kinds.get(job.model) == kinds.get(own_jobs[0].model)]
            rates[probe] = timer.rates(same_kind)
        always = {job.probe: job for job in reversed(jobs) if runs_always(job)}
        for job in always.values():
            timer.sizes[job.probe].add(job, executor.execute(job).rows)
        factors: dict[str, float] = {}
        examples = {kind: next(job for job in timeable if kinds.get(job.model) == kind) for kind in {*kinds.values()}}
        reference = timeable[0]
        for kind, job in examples.items():
            fixed, per_cost = rates[job.probe]
            predicted = fixed + per_cost * job.cost
            is_reference = kind == kinds.get(reference.model)
            factor = 1.0 if is_reference or not predicted else timer.seconds(job) / predicted
            factors |= {label: factor for label in executor.used_labels if kinds[label] == kind}
        longest = max(_tokens(job.cost) for job in timeable)
        for job in jobs:  # a probe whose jobs all depend on others has none that can be timed
            rates.setdefault(job.probe, next(iter(rates.values())))
        peak = timer.peak_at(longest)
        return CostModel(rates, factors, timer.opening_seconds, timer.stored_bytes, timer.commit_seconds, peak)


def costs_of_run(run: Run, jobs: Sequence[Job]) -> CostModel:
    """Costs from the timings of a stored run. Raises BadInput if it has none of a probe."""
    timings = run.manifest["timings"]
    rows = timings.get("by_probe", [])
    rates: dict[str, tuple[float, float]] = {}
    for probe in dict.fromkeys(job.probe for job in jobs if not runs_always(job)):
        own_rows = [row for row in rows if row["probe"] == probe]
        if not sum(row["cost"] for row in own_rows):
            raise BadInput(f"run {run.path} has no timings of '{probe}'. Use a run that was not interrupted")
        rates[probe] = (0.0, sum(row["seconds"] for row in own_rows) / sum(row["cost"] for row in own_rows))
    factors: dict[str, float] = {}
    for label in {row["model"] for row in rows}:
        own_rows = [row for row in rows if row["model"] == label and row["probe"] in rates]
        predicted = sum(rates[row["probe"]][1] * row["cost"] for row in own_rows)
        if predicted:
            factors[label] = sum(row["seconds"] for row in own_rows) / predicted
    checkpoints = len({model["checkpoint"] for model in run.manifest["models"]})
    cells = sum(row["cells"] for row in rows)
    size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
    opening = timings["opening_seconds"] / checkpoints

    def share(jobs: Sequence[Job]) -> float:
        return sum(job.probe in rates for job in jobs) / float(cells)

    def stored_bytes(jobs: Sequence[Job]) -> float:
        return size * share(jobs)

    def commit_seconds(jobs: Sequence[Job]) -> float:
        return float(timings.get("commit_seconds", 0.0) * share(jobs))

    return CostModel(rates, factors, opening, stored_bytes, commit_seconds, timings["peak_bytes"])


class _Timer:
    """Runs jobs to time them, and collects the sizes of their rows in `sizes`, by probe."""

    def __init__(self, executor: JobExecutor, progress: Progress) -> None:
        self.executor, self.progress = executor, progress
        self.sizes: dict[str, StoredSize] = defaultdict(StoredSize)
        self.opening_seconds, self._is_warm = 0.0, False
        self._peaks: list[tuple[int, float]] = []

    def seconds(self, job: Job) -> float:
        """Seconds of one job."""
        self.progress.set_activity(f"timing {job.probe}, {job.cell.id}")
        results: list[JobResult] = []
        while len(results) < REPEATS:
            result = self.executor.execute(job)
            self.progress.advance(job.cost)
            is_long = result.seconds > MAX_JOB_SECONDS
            if not self._is_warm:  # the first pass of a process pays for page faults and thread pools
                self.opening_seconds, self._is_warm = result.opening_seconds, True
                if not is_long:
                    continue
            results.append(result)
            if is_long:
                break
        self.sizes[job.probe].add(job, results[0].rows)
        self._peaks.append((_tokens(job.cost), peak_bytes()))
        return min(result.seconds / (1 + result.cells_ahead) for result in results)

    def stored_bytes(self, jobs: Sequence[Job]) -> float:
        """Predicted size of the tables of all jobs. A probe whose jobs all depend on others was not run here."""
        return sum(self.sizes[probe].predict(own_jobs) for probe, own_jobs in _by_probe(jobs).items())

    def commit_seconds(self, jobs: Sequence[Job]) -> float:
        """Predicted seconds in which the tables of all jobs are merged."""
        return sum(self.sizes[probe].commit_seconds(own_jobs) for probe, own_jobs in _by_probe(jobs).items())

    def rates(self, jobs: Sequence[Job]) -> tuple[float, float]:
        """(seconds per job, seconds per unit of cost), from the first job and the longest affordable one."""
        first = jobs[0]
        first_seconds = self.seconds(first)
        affordable = first.cost * MAX_JOB_SECONDS / max(first_seconds, 1e-9)
        longer = [job for job in jobs if first.cost * 1.5 < job.cost < affordable]
        if not longer:
            return 0.0, first_seconds / max(first.cost, 1e-9)
        second = max(longer, key=lambda job: job.cost)
        self.progress.extend(REPEATS * second.cost)
        per_cost = max((self.seconds(second) - first_seconds) / (second.cost - first.cost), 0.0)
        return max(first_seconds - per_cost * first.cost, 0.0), per_cost

    def peak_at(self, tokens: int) -> float:
        """Bytes of memory at that many tokens, extrapolated from the timed jobs."""
        (short, short_bytes), (long, long_bytes) = min(self._peaks), max(self._peaks)
        return (
            long_bytes + (long_bytes - short_bytes) / (long - short) * max(tokens - long, 0)
            if long > short
            else long_bytes
        )


def _model_kinds(executor: JobExecutor) -> dict[str, str]:
    """Models by label with a key that models of equal speed share: one configuration under one kind of scheme."""
    kinds: dict[str, str] = {}
    for label in executor.used_labels:
        spec = executor.context.specs[label]
        folder = Path(loading.locate(spec.checkpoint)[0])
        kinds[label] = f"{digest_files([folder / 'config.json'])} {spec.scheme.name}"
    return kinds


def _by_checkpoint(jobs: Sequence[Job], checkpoints: Mapping[str, str]) -> dict[str, list[Job]]:
    grouped: dict[str, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(checkpoints[job.model] if job.model else "none", []).append(job)
    return grouped


def _by_probe(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    grouped: dict[str, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(job.probe, []).append(job)
    return grouped


def _tokens(cost: float) -> int:
    """Tokens of one pass of that cost: the inverse of `pass_cost`."""
    return round(2048 * (math.sqrt(1 + cost / 1024) - 1))
