"""Which worker makes which cell next. Ray runs by it, and `headscope plan` simulates it.

Cells that follow each other - those of one model in one section - are a strand, and a worker goes through a strand in
order, since they may share work. A free worker stays with its checkpoint while that has a strand that nobody has; else
it takes the checkpoint with most to do that nobody has, longest strand first; where all have somebody, the back half of
the longest strand.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headscope import plugins
from headscope.study.executor import POSITIONS, Job


@dataclass(eq=False)
class _Strand:
    checkpoint: str
    whole: bool
    """Whether each cell goes on from what the one before left, so that one worker makes them all."""
    jobs: list[Job] = field(default_factory=list)
    cost: float = 0.0
    worker: int | None = None

    def put(self, job: Job, at: int) -> None:
        self.jobs.insert(at, job)
        self.cost += job.cell.cost

    def pick(self, job: Job) -> Job:
        self.jobs.remove(job)
        self.cost -= job.cell.cost
        return job


class Sharing:
    """The jobs that are to be done, handed out to workers by number."""

    def __init__(self, jobs: Sequence[Job], checkpoints: Mapping[str, str], stored: Iterable[str] = ()) -> None:
        """`checkpoints` are those of the models, by label; `stored` are ids of jobs that are done already."""
        self._stored = set(stored)
        self._holds: dict[int, str] = {}
        self._in_hand: dict[int, _Strand] = {}
        self._of: dict[str, _Strand] = {}
        strands: dict[tuple[str, str | None], _Strand] = {}
        for job in jobs:
            section, label = job.section, job.cell.model
            checkpoint = section if label is None else checkpoints[label]
            key = (section, None if _goes_on(section) else label)
            strand = strands.setdefault(key, _Strand(checkpoint, _goes_on(section)))
            strand.put(job, len(strand.jobs))
            self._of[job.id] = strand
        self._strands = list(strands.values())

    @property
    def left(self) -> list[Job]:
        """What nobody does yet."""
        return [job for strand in self._strands for job in strand.jobs]

    def take(self, worker: int) -> Job | None:
        """What that worker, which is free, does next; None where all that is left waits for others."""
        own = self._in_hand.get(worker)
        strand = own if own is not None and self._next(own) else self._free(worker) or self._half()
        job = self._next(strand) if strand else None
        if strand is None or job is None:
            return None
        strand.worker, self._in_hand[worker], self._holds[worker] = worker, strand, strand.checkpoint
        return strand.pick(job)

    def done(self, job: Job) -> None:
        """That job's rows are stored."""
        self._stored.add(job.id)

    def gone(self, worker: int, job: Job | None) -> None:
        """A worker is no more: the job that it did and those that it had before it are for the others."""
        self._holds.pop(worker, None)
        self._in_hand.pop(worker, None)
        if job is not None:
            strand = self._of[job.id]
            strand.put(job, 0)
            if strand not in self._strands:
                self._strands.append(strand)
        for strand in self._strands:
            if strand.worker == worker:
                strand.worker = None

    def give_up(self, job: Job) -> list[Job]:
        """Leave that job out and those that cannot be done without it; returns all of them."""
        strand = self._of[job.id]
        lost = [job, *(strand.jobs if strand.whole else ())]
        while more := [each for each in self.left if each not in lost and each.needs & {known.id for known in lost}]:
            lost += more
        for each in lost:
            if each in self._of[each.id].jobs:
                self._of[each.id].pick(each)
        return lost

    def _next(self, strand: _Strand) -> Job | None:
        """The first job of a strand that waits for no other."""
        return next((job for job in strand.jobs if job.needs <= self._stored), None)

    def _free(self, worker: int) -> _Strand | None:
        """The strand that nobody has and that the worker takes up."""
        self._strands = [strand for strand in self._strands if strand.jobs]
        free = [strand for strand in self._strands if strand.worker is None and self._next(strand)]
        left: dict[str, float] = {}
        for strand in free:
            left[strand.checkpoint] = left.get(strand.checkpoint, 0.0) + strand.cost
        held, taken = self._holds.get(worker), set(self._holds.values())

        def wanted(strand: _Strand) -> tuple[bool, bool, float, float]:
            checkpoint = strand.checkpoint
            return checkpoint == held, checkpoint not in taken, left[checkpoint], strand.cost

        return max(free, key=wanted, default=None)

    def _half(self) -> _Strand | None:
        """The back half of the longest strand that somebody has, as a strand of its own."""
        shared = [strand for strand in self._strands if strand.worker is not None and not strand.whole]
        longest = max((strand for strand in shared if self._next(strand)), key=lambda each: each.cost, default=None)
        if longest is None:
            return None
        half, wanted = _Strand(longest.checkpoint, False), longest.cost / 2
        for job in [job for job in reversed(longest.jobs) if job.needs <= self._stored]:
            half.put(longest.pick(job), 0)
            self._of[job.id] = half
            if half.cost >= wanted:
                break
        self._strands.append(half)
        return half


def _goes_on(section: str) -> bool:
    """Whether the cells of a section may go on from files that others of it left: those of models never do."""
    return section != POSITIONS and "models" not in plugins.probes()[section].takes
