"""How a cell becomes table rows, wherever it runs, and what is told of the model that it is of."""

import platform
import resource
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from headscope import plugins
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.tables import position_tables
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, Section
from headscope.study.checkpoint_glob import training_step
from headscope.study.context import Materials

POSITIONS = "positions"
"""The section that every study has."""


@dataclass(frozen=True)
class Job:
    """A cell with the section that it is of."""

    section: str
    cell: Cell

    @property
    def id(self) -> str:
        return f"{self.section}/{self.cell.id}"

    @property
    def needs(self) -> frozenset[str]:
        """Jobs whose rows it reads."""
        return frozenset(f"{self.section}/{cell}" for cell in self.cell.before)


@dataclass(frozen=True)
class Made:
    """What came of a cell: its rows, digests of what they are made from, and how much of its cost progress was told.

    `described` is what run.json tells of its model, with the positions; `seconds` is the time it took, without the
    `opening` of a checkpoint before it.
    """

    rows: Mapping[str, Rows]
    inputs: Mapping[str | None, Mapping[str, str]]
    advanced: float
    described: Mapping[str, Any] | None
    seconds: float = 0.0
    opening: float = 0.0
    peak: float = 0.0
    """Bytes of memory that its process came to need."""


Work = Generator[tuple[Job, Made], None, None]
"""Jobs with what came of them, as they are made."""


class Maker:
    """Makes cells, with one checkpoint in memory at a time. `used` are the models that cells are of."""

    def __init__(self, materials: Materials) -> None:
        self.materials = materials
        self.used: Sequence[str] = materials.labels
        self.sections: dict[str, Section] = {POSITIONS: _Positions()}
        for name, config in materials.study.sections.items():
            self.sections[name] = plugins.part(plugins.probes()[name], "cells")(config, materials)

    def make(self, job: Job) -> Made:
        materials, label = self.materials, job.cell.model
        materials.advanced = 0.0
        began = time.monotonic()
        model = None if label is None else materials.model(label)
        if label is not None:  # a scheme that cannot be is told before any other of its checkpoint is measured
            for other in self.used:
                if materials.checkpoint(other) == materials.checkpoint(label):
                    _ = materials.model(other).schedule
        ready = time.monotonic()
        rows = self.sections[job.section].rows(job.cell, model)
        done = time.monotonic()
        inputs = {each: dict(materials.inputs[each]) for each in (label, None)}
        known = describe(label, materials) if job.section == POSITIONS and label is not None else None
        return Made(rows, inputs, materials.advanced, known, done - ready, ready - began, peak_bytes())


class _Positions:
    """The frequencies and temperatures of a model, read off without a pass."""

    def cells(self) -> list[Cell]:
        return []  # the runner knows which models are used

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        return position_tables(cell.model, model)


def describe(label: str, materials: Materials) -> dict[str, Any]:
    """What run.json tells of one model."""
    model, spec = materials.model(label), materials.study.models[label]
    learned = model.schedule if isinstance(model.schedule, AdaRoPE) else None
    return {
        "label": label,
        "spec": spec,
        "checkpoint": model.name,
        "revision": getattr(model.module.config, "_commit_hash", None),
        "weights_sha256": model.weights_sha256,
        "scheme": model.scheme,
        "adapter_sha256": None if learned is None else learned.sha256,
        "step": training_step(materials.checkpoint(label)) if learned is None else learned.step,
        "geometry": {"layers": model.geometry.layers, **asdict(model.geometry)},
        "dtype": str(model.module.dtype).removeprefix("torch."),
    }


def peak_bytes() -> float:
    """Bytes of memory that this process came to need, those of the GPUs where there are some."""
    if torch.cuda.is_available():
        return float(sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def hardware() -> dict[str, Any]:
    """What run.json tells of the machine that this process is on."""
    return {
        "machine": platform.machine(),
        "cpus": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }
