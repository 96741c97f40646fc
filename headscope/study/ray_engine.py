"""The engine `ray`: jobs run on Ray workers with one opened checkpoint each, on this machine or on a cluster.

This process plans, assigns jobs (`headscope.study.scheduler`) and alone stores results. If a worker dies, another one
retries its job; a job that kills every worker is named at the end, with all others stored.
"""

import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headscope.errors import BadInput, InputChanged, Interrupted, ResourceMissing
from headscope.study.cells import Job
from headscope.study.config import EngineOptions
from headscope.study.executor import JobExecutor, JobResult, Results
from headscope.study.progress import Progress
from headscope.study.ray_cluster import WorkerResources, check_address, check_local_ray, connect_to_ray
from headscope.study.ray_worker import RayWorker
from headscope.study.scheduler import Scheduler

log = logging.getLogger("headscope")

MAX_ATTEMPTS = 3
"""How often a job is started before it is given up."""
START_TIMEOUT = 300.0
"""Seconds within which a worker must start."""


class RayEngine:
    """Executes jobs on Ray workers. Raises ResourceMissing if Ray is not installed."""

    def __init__(self, options: EngineOptions) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ResourceMissing("Ray is not installed. Run pip install 'headscope[ray]', or leave out --engine ray")
        if options.address is not None:
            check_address(options.address)
        self.options = options
        self.description: Mapping[str, Any] = {}

    def execute(self, jobs: Sequence[Job], executor: JobExecutor, progress: Progress) -> Results:
        context = executor.context
        if context.in_memory_models:
            raise BadInput(
                f"model '{min(context.in_memory_models)}' is in memory and cannot be sent to Ray workers. Save it and "
                "give the path of its folder"
            )
        if jobs:
            with connect_to_ray(self.options, context.study.device) as resources:
                pool = _WorkerPool(jobs, executor, resources, progress)
                try:
                    yield from pool.results()
                finally:
                    self.description = {"workers": pool.hardware}
                    pool.kill_workers()


@dataclass(eq=False)
class _Worker:
    number: int
    actor: Any
    job: Job | None = None
    pending: dict[Any, str] = field(default_factory=dict)
    """Ray references by the method that was called: hardware, execute or progress."""


class _WorkerPool:
    """The workers of a study and their jobs."""

    def __init__(
        self, jobs: Sequence[Job], executor: JobExecutor, resources: WorkerResources, progress: Progress
    ) -> None:
        checkpoints = {label: executor.context.checkpoint_name(label) for label in executor.used_labels}
        stored = {job_id for job in jobs for job_id in job.prerequisites} - {job.id for job in jobs}
        self.scheduler = Scheduler(jobs, checkpoints, stored)
        self.executor, self.resources, self.progress = executor, resources, progress
        self.hardware: list[dict[str, Any]] = []
        self._attempts: dict[str, int] = {}
        self._failed_jobs: dict[str, str] = {}
        self._failed_starts = 0
        self._workers = [self._start(number) for number in range(1, resources.workers + 1)]

    def results(self) -> Results:
        """Yield every job that can be done with its result.

        Raises Interrupted at the end if some could not, or at once if a process of the local Ray ended.
        """
        import ray

        last_answer = time.monotonic()
        while True:
            for worker in self._workers:
                if worker.job is None and "hardware" not in worker.pending.values():
                    self._assign(worker)
            if not self.scheduler.has_unassigned and not any(worker.job for worker in self._workers):
                break
            pending = {reference: worker for worker in self._workers for reference in worker.pending}
            finished, _ = ray.wait(list(pending), timeout=1.0)
            check_local_ray()
            for reference in finished:
                last_answer = time.monotonic()
                yield from self._process_answer(pending[reference], reference)
            none_started = all("hardware" in worker.pending.values() for worker in self._workers)
            if none_started and time.monotonic() - last_answer > START_TIMEOUT:
                raise BadInput(
                    f"no worker started within {START_TIMEOUT:.0f} s: each needs {self.resources.cpus} free cores and "
                    f"{self.resources.gpus:g} free GPUs. Finished work items are kept. Free cores or GPUs, or use "
                    "smaller --workers or --gpus-per-worker; then add --resume"
                )
        if self._failed_jobs:
            folder = self.executor.context.files_folder.parent
            names = ", ".join(f"'{name}'" for name in self._failed_jobs)
            reason = next(iter(self._failed_jobs.values()))
            raise Interrupted(
                f"every worker that ran {names} died ({reason}). All other work items are kept in {folder}. Give "
                "workers more memory, then add --resume"
            )

    def kill_workers(self) -> None:
        """Stop every worker."""
        import ray

        for worker in self._workers:
            ray.kill(worker.actor)

    def _start(self, number: int) -> _Worker:
        import ray

        context, resources = self.executor.context, self.resources
        study = context.study.model_dump(mode="json", exclude_unset=True)
        # The second concurrency group delivers progress while a long job runs.
        options = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "max_restarts": 0,
            "concurrency_groups": {"progress": 1},
        }
        actor_class: Any = ray.remote(**options)(RayWorker)
        actor = actor_class.remote(
            study, self.executor.used_labels, resources.cpus, Path.cwd(), context.files_folder.absolute()
        )
        worker = _Worker(number, actor)
        worker.pending[actor.hardware.remote()] = "hardware"
        self._request_progress(worker)
        return worker

    def _request_progress(self, worker: _Worker) -> None:
        reference = worker.actor.progress_messages.options(concurrency_group="progress").remote()
        worker.pending[reference] = "progress"

    def _assign(self, worker: _Worker) -> None:
        job = self.scheduler.next_job(worker.number)
        if job is not None:
            stored = {(job_id, table): rows for job_id in job.prerequisites for table, rows in self._stored(job_id)}
            self.progress.set_activity(job.cell.id, self._name(worker))
            worker.job = job
            worker.pending[worker.actor.execute.remote(job, stored)] = "execute"

    def _stored(self, job_id: str) -> Iterator[tuple[str, Any]]:
        context = self.executor.context
        return ((table, context.read_stored(job_id, table)) for table in context.stored_tables(job_id))

    def _process_answer(self, worker: _Worker, reference: Any) -> Results:
        import ray

        method = worker.pending.pop(reference, "")
        if not method:
            return  # the worker died meanwhile, as another of its answers showed
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayTaskError as error:  # the same error as without Ray
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from error
        except ray.exceptions.RayError as error:
            self._replace(worker, error)
            return
        if method == "hardware":
            self._failed_starts = 0
            self.hardware.append(answer)
        elif method == "progress":
            for cost, description in answer:
                if description:
                    self.progress.set_activity(description, self._name(worker))
                self.progress.advance(cost)
            self._request_progress(worker)
        elif worker.job is not None:
            job, worker.job = worker.job, None
            result, log_lines = answer
            for level, line in log_lines:
                log.log(level, line)
            self._compare_inputs(result)
            yield job, result
            self.scheduler.finish(job)

    def _replace(self, worker: _Worker, error: Exception) -> None:
        """Start another worker in the place of one that died; any worker may retry its job."""
        import ray

        ray.kill(worker.actor)  # it may only be unreachable
        reason, job = " ".join(str(error).partition("class_name")[0].split())[:200], worker.job
        log.warning("%s died%s: %s", self._name(worker), f" at {job.cell.id}" if job else "", reason)
        self.scheduler.remove_worker(worker.number, job)
        if job is None:
            self._failed_starts += 1
        else:
            self._attempts[job.id] = self._attempts.get(job.id, 0) + 1
            if self._attempts[job.id] == MAX_ATTEMPTS:
                self._failed_jobs |= {dropped.cell.id: reason for dropped in self.scheduler.give_up(job)}
        if self._failed_starts > MAX_ATTEMPTS * self.resources.workers:
            raise ResourceMissing(
                f"Ray workers exited during start-up: {reason}. Check the memory, or use --engine plain"
            )
        worker.pending.clear()
        self._workers[self._workers.index(worker)] = self._start(worker.number)

    def _compare_inputs(self, result: JobResult) -> None:
        """Raise InputChanged if the inputs of a worker differ from those of this process."""
        for label, digests in result.input_digests.items():
            recorded_digests = self.executor.context.input_digests[label]
            if differing := [name for name, digest in digests.items() if recorded_digests.get(name, digest) != digest]:
                owner = f" of '{label}'" if label is not None else ""
                remedy = "Pass --dtype fp32 or bf16" if differing[0] == "dtype" else "Give all nodes the same files"
                raise InputChanged(f"a Ray worker reads a different {differing[0]}{owner} than the driver. {remedy}")
            recorded_digests |= digests

    def _name(self, worker: _Worker) -> str:
        return f"worker {worker.number} of {self.resources.workers}"
