"""How long a study takes in this process and on workers of Ray."""

import time
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from headscope.study.runner import run_study

DOCS = 8
"""Documents of the study."""


def engines(spec: str, length: int) -> list[dict[str, Any]]:
    """One row per engine: how long the same study takes in this process, with all its threads, and on as many workers
    of one thread each; `ratio` is of throughput. What comes `before` the first cell is told apart: a study has it once.
    """
    threads = torch.get_num_threads()
    content = {"name": "bench", "models": {"base": spec}, "texts": {"docs": DOCS}, "measure": {"lengths": [length]}}
    clocks = {}
    for what, engine in (
        (f"one process, {threads} threads", {"name": "plain"}),
        (f"{threads} workers, one thread each", {"name": "ray", "workers": threads}),
    ):
        clocks[what] = _Clock()
        with TemporaryDirectory() as aside:
            run_study(build_study({**content, "engine": engine}), aside, progress=clocks[what])
    alone = next(iter(clocks.values())).seconds
    return [
        {
            "length": length,
            "what": what,
            "seconds": round(clock.seconds, 1),
            "before": round(clock.before, 1),
            "ratio": round(alone / clock.seconds, 2),
        }
        for what, clock in clocks.items()
    ]


class _Clock(NoProgress):
    """Seconds from the first cell that is begun to the last that is stored, and those before the first."""

    def __init__(self) -> None:
        self._made, self._completed_at_start, self._last = time.monotonic(), 0.0, 0.0

    def set_activity(self, what: str, worker: str = "") -> None:
        self._completed_at_start = self._completed_at_start or time.monotonic()

    def advance(self, cost: float) -> None:
        self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._last - self._completed_at_start

    @property
    def before(self) -> float:
        return self._completed_at_start - self._made
