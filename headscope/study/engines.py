"""Where jobs run: in this process, or on Ray workers (`headscope.study.ray_engine`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headscope.study.cells import Job
from headscope.study.config import EngineOptions
from headscope.study.executor import CellExecutor, Results
from headscope.study.progress import Progress


class Engine(Protocol):
    """Executes jobs and yields each result as soon as it is there. `description` goes into run.json."""

    description: Mapping[str, Any]

    def execute(self, jobs: Sequence[Job], executor: CellExecutor, progress: Progress) -> Results: ...


class LocalEngine:
    """Executes one job after another in this process."""

    description: Mapping[str, Any] = {}

    def execute(self, jobs: Sequence[Job], executor: CellExecutor, progress: Progress) -> Results:
        for job in jobs:
            progress.set_activity(job.cell.id)
            yield job, executor.execute(job)


def create_engine(options: EngineOptions) -> Engine:
    """The engine that a study requests. Raises Missing if it is not installed."""
    if options.name == "plain":
        return LocalEngine()
    from headscope.study.ray_engine import RayEngine

    return RayEngine(options)
