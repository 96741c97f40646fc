"""What the cells of a run took, by section and model, so that another study can be planned by it."""

from dataclasses import dataclass, field
from typing import Any

from headscope.study.executor import POSITIONS, Job, Made


@dataclass
class Spent:
    """Seconds of the cells that were made, in the order of their making."""

    _by: dict[tuple[str, str | None], dict[str, float]] = field(default_factory=dict)
    _opening: float = 0.0
    _peak: float = 0.0

    def add(self, job: Job, made: Made) -> None:
        label = job.cell.model
        self._opening += made.opening
        self._peak = max(self._peak, made.peak)
        if job.section != POSITIONS:
            sums = self._by.setdefault((job.section, label), {"cells": 0, "cost": 0.0, "seconds": 0.0})
            for name, value in (("cells", 1), ("cost", job.cell.cost), ("seconds", made.seconds)):
                sums[name] += value

    def told(self) -> dict[str, Any]:
        """What run.json keeps: by section and model, how many cells, their cost and seconds; seconds of opening
        checkpoints; and the bytes of memory that the largest process came to need."""
        made = [
            {"section": section, "model": label, **{name: round(value, 3) for name, value in sums.items()}}
            for (section, label), sums in self._by.items()
        ]
        return {"made": made, "opening": round(self._opening, 3), "peak": round(self._peak)}
