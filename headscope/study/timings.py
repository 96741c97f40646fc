"""How long the cells of a run took, by probe and model, for planning other studies."""

from dataclasses import dataclass, field
from typing import Any

from headscope.study.cells import Job
from headscope.study.executor import CellResult, runs_always


@dataclass
class CellTimings:
    """Sums over finished jobs."""

    _sums: dict[tuple[str, str | None], dict[str, float]] = field(default_factory=dict)
    _opening: float = 0.0
    _peak: float = 0.0

    def add(self, job: Job, result: CellResult) -> None:
        self._opening += result.opening_seconds
        self._peak = max(self._peak, result.peak_bytes)
        if not runs_always(job):
            sums = self._sums.setdefault((job.probe, job.model), {"cells": 0, "cost": 0.0, "seconds": 0.0})
            for name, value in (("cells", 1), ("cost", job.cost), ("seconds", result.seconds)):
                sums[name] += value

    def to_dict(self) -> dict[str, Any]:
        """The entry `spent` of run.json: cells, cost and seconds by probe and model (`made`), seconds of opening
        checkpoints, and bytes of memory of the largest process (`peak`)."""
        rows = [
            {"section": probe, "model": label, **{name: round(value, 3) for name, value in sums.items()}}
            for (probe, label), sums in self._sums.items()
        ]
        return {"made": rows, "opening": round(self._opening, 3), "peak": round(self._peak)}
