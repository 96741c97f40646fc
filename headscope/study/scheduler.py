"""Which worker runs which job next. The Ray engine follows it, and `headscope plan` simulates it.

Jobs of one model in one probe form a queue. A worker goes through a queue in order, since neighbouring jobs may share
work. A free worker stays with its checkpoint while that has an unassigned queue; otherwise it takes the checkpoint with
the most unassigned work, longest queue first; if every queue is assigned, it takes the back half of the longest one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headscope.base import plugins
from headscope.study.cells import Job


@dataclass(eq=False)
class _JobQueue:
    checkpoint: str
    is_chain: bool
    """Whether each job continues from files of the one before, so that one worker must run them all."""
    jobs: list[Job] = field(default_factory=list)
    cost: float = 0.0
    worker: int | None = None

    def insert(self, job: Job, index: int) -> None:
        self.jobs.insert(index, job)
        self.cost += job.cost

    def remove(self, job: Job) -> Job:
        self.jobs.remove(job)
        self.cost -= job.cost
        return job


class Scheduler:
    """Assigns jobs to workers, which are known by number."""

    def __init__(self, jobs: Sequence[Job], checkpoints: Mapping[str, str], stored: Iterable[str] = ()) -> None:
        """`checkpoints` are names of checkpoints by model label; `stored` are ids of jobs that are done already."""
        self._stored = set(stored)
        self._checkpoint_of_worker: dict[int, str] = {}
        self._queue_of_worker: dict[int, _JobQueue] = {}
        self._queue_of_job: dict[str, _JobQueue] = {}
        queues: dict[tuple[str, str | None], _JobQueue] = {}
        for job in jobs:
            checkpoint = checkpoints[job.model] if job.model else job.probe
            is_chain = _is_chain(job)
            queue = queues.setdefault((job.probe, None if is_chain else job.model), _JobQueue(checkpoint, is_chain))
            queue.insert(job, len(queue.jobs))
            self._queue_of_job[job.id] = queue
        self._queues = list(queues.values())

    @property
    def has_unassigned(self) -> bool:
        """Whether there are jobs that no worker has started."""
        return any(queue.jobs for queue in reversed(self._queues))

    @property
    def unassigned(self) -> list[Job]:
        """Jobs that no worker has started."""
        return [job for queue in self._queues for job in queue.jobs]

    def next_job(self, worker: int) -> Job | None:
        """Assign the next job to a free worker; None if all jobs that are left wait for others."""
        worker_queue = self._queue_of_worker.get(worker)
        queue = (
            worker_queue
            if worker_queue is not None and self._first_ready(worker_queue)
            else self._unassigned_queue(worker) or self._split()
        )
        job = self._first_ready(queue) if queue else None
        if queue is None or job is None:
            return None
        queue.worker, self._queue_of_worker[worker] = worker, queue
        self._checkpoint_of_worker[worker] = queue.checkpoint
        return queue.remove(job)

    def finish(self, job: Job) -> None:
        """Record that the rows of a job are stored."""
        self._stored.add(job.id)

    def remove_worker(self, worker: int, job: Job | None) -> None:
        """Return the current job and the queue of a dead worker to the others."""
        self._checkpoint_of_worker.pop(worker, None)
        self._queue_of_worker.pop(worker, None)
        if job is not None:
            queue = self._queue_of_job[job.id]
            queue.insert(job, 0)
            if queue not in self._queues:
                self._queues.append(queue)
        for queue in self._queues:
            if queue.worker == worker:
                queue.worker = None

    def give_up(self, job: Job) -> list[Job]:
        """Drop a job and all jobs that depend on it; return them."""
        queue = self._queue_of_job[job.id]
        dropped = [job, *(queue.jobs if queue.is_chain else ())]
        while dependent := [
            candidate
            for candidate in self.unassigned
            if candidate not in dropped and candidate.prerequisites & {lost_job.id for lost_job in dropped}
        ]:
            dropped += dependent
        for lost_job in dropped:
            if lost_job in self._queue_of_job[lost_job.id].jobs:
                self._queue_of_job[lost_job.id].remove(lost_job)
        return dropped

    def _first_ready(self, queue: _JobQueue) -> Job | None:
        return next((job for job in queue.jobs if job.prerequisites <= self._stored), None)

    def _unassigned_queue(self, worker: int) -> _JobQueue | None:
        self._queues = [queue for queue in self._queues if queue.jobs]
        unassigned = [queue for queue in self._queues if queue.worker is None and self._first_ready(queue)]
        cost_of_checkpoint: dict[str, float] = {}
        for queue in unassigned:
            cost_of_checkpoint[queue.checkpoint] = cost_of_checkpoint.get(queue.checkpoint, 0.0) + queue.cost
        open_checkpoint = self._checkpoint_of_worker.get(worker)
        open_checkpoints = set(self._checkpoint_of_worker.values())

        def priority(queue: _JobQueue) -> tuple[bool, bool, float, float]:
            checkpoint = queue.checkpoint
            is_new = checkpoint not in open_checkpoints
            return checkpoint == open_checkpoint, is_new, cost_of_checkpoint[checkpoint], queue.cost

        return max(unassigned, key=priority, default=None)

    def _split(self) -> _JobQueue | None:
        """Move the back half of the longest assigned queue into a new queue."""
        divisible = [queue for queue in self._queues if queue.worker is not None and not queue.is_chain]
        ready = [queue for queue in divisible if self._first_ready(queue)]
        longest = max(ready, key=lambda queue: queue.cost, default=None)
        if longest is None:
            return None
        half, half_cost = _JobQueue(longest.checkpoint, False), longest.cost / 2
        for job in [job for job in reversed(longest.jobs) if job.prerequisites <= self._stored]:
            half.insert(longest.remove(job), 0)
            self._queue_of_job[job.id] = half
            if half.cost >= half_cost:
                break
        self._queues.append(half)
        return half


def _is_chain(job: Job) -> bool:
    """Whether jobs of this probe may continue from files of earlier ones: never if the probe measures models."""
    return not any("models" in plugins.probes()[name].takes for name, _ in job.parts)
