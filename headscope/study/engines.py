"""Where cells are made: in this process, or by workers of Ray (`headscope.study.ray_engine`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headscope.study.config import Engine
from headscope.study.executor import Job, Maker, Work
from headscope.study.progress import Progress


class Workshop(Protocol):
    """An engine: makes cells and hands each over to be stored, as soon as it is made.

    `told` is what run.json says of it.
    """

    told: Mapping[str, Any]

    def make(self, jobs: Sequence[Job], maker: Maker, progress: Progress) -> Work: ...


class Here:
    """One cell after another, in this process."""

    told: Mapping[str, Any] = {}

    def make(self, jobs: Sequence[Job], maker: Maker, progress: Progress) -> Work:
        for job in jobs:
            progress.doing(job.cell.id)
            yield job, maker.make(job)


def engine(wanted: Engine) -> Workshop:
    """The engine that a study asks for. Raises Missing where it is not installed."""
    if wanted.name == "plain":
        return Here()
    from headscope.study.ray_engine import OnRay

    return OnRay(wanted)
