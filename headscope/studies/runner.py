"""The cell runner: sections yield cells, a cell becomes table rows, each is stored as it finishes.

Measuring and every probe run through here. One checkpoint is in memory at a time; cells that are already stored are
skipped, so an interrupted run goes on where it stopped. Of every model that is used the runner itself stores the
position parameters.
"""

import logging
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from headscope import door
from headscope.errors import BadInput, Interrupted
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.tables import position_tables
from headscope.runs.arrow import Rows
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from headscope.studies.batch import training_step
from headscope.studies.cells import Cell, Section
from headscope.studies.config import Study
from headscope.studies.materials import Materials
from headscope.studies.progress import Progress, Silent

log = logging.getLogger("headscope")


class _Positions:
    """Cells: the frequencies and temperatures of each model, read off without a pass."""

    def __init__(self, labels: list[str], materials: Materials):
        self.labels = labels

    def cells(self) -> list[Cell]:
        return [Cell(f"{label}: positions", label, 0.0) for label in self.labels]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        return position_tables(cell.model, model)


def run(
    study: Study,
    out: Path | str = "runs",
    *,
    resume: bool = False,
    given: Mapping[str, Model] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Execute every section of a study into one run directory under `out` and return it.

    Raises BadInput, Missing and the like before any work is done; Interrupted on Ctrl-C, with every finished
    cell kept for `resume`.
    """
    progress = progress or Silent()
    if not study.sections:
        raise BadInput(f"the study has no section: add one of {', '.join(door.probes())}")
    materials = Materials(study, given or {}, progress)
    sections: dict[str, Section] = {
        name: door.part(door.probes()[name], "cells")(config, materials) for name, config in study.sections.items()
    }
    measuring = [(name, cell) for name, section in sections.items() for cell in section.cells()]
    used = [label for label in study.models if any(cell.model == label for _, cell in measuring)]
    steps = {label: _step(label, materials) for label in used}
    for label in used:
        materials.identify(label)
    sections["positions"] = _Positions(used, materials)
    plan = [("positions", cell) for cell in sections["positions"].cells()] + measuring
    config = study.model_dump(mode="json", exclude_none=True)
    config["models"] = {label: _identified(label, study.models[label], materials) for label in used}
    started = time.monotonic()
    with _interruptible(RunWriter.open(Path(out), study.name, config, resume)) as writer:
        if resume and (finished := writer.finished(_told(materials.inputs))) is not None:
            log.info("this run is finished already, and nothing was measured again: %s", finished.path)
            return finished
        writer.compare(_told(materials.inputs))
        materials.files = writer.files
        materials.stored = writer.stored
        todo = [(name, cell) for name, cell in plan if not writer.done(f"{name}/{cell.id}")]
        # Grouped by checkpoint, so that each is loaded once. What is merely read off comes last: a mistake that shows
        # when a model is first run leaves nothing behind.
        turn = _turns(materials)
        todo.sort(key=lambda item: (*turn.get(item[1].model, (-1, -1)), item[0] == "positions"))
        described: dict[str, dict[str, Any]] = {}
        progress.start(sum(cell.cost for _, cell in plan), sum(c.cost for _, c in plan) - sum(c.cost for _, c in todo))
        try:
            for name, cell in todo:
                progress.doing(cell.id)
                materials.advanced = 0.0
                model = None if cell.model is None else materials.model(cell.model)
                for label in used:  # a scheme that cannot be is told before any other of its checkpoint is measured
                    if cell.model is not None and turn[label][0] == turn[cell.model][0]:
                        _ = materials.model(label).schedule
                rows = sections[name].rows(cell, model)
                writer.note(_told({label: materials.inputs[label] for label in (cell.model, None)}))
                writer.add(f"{name}/{cell.id}", rows)
                if name == "positions" and cell.model is not None:
                    described[cell.model] = _described(cell.model, materials, steps[cell.model])
                progress.done(cell.cost - materials.advanced)
        finally:
            progress.stop()
        seconds = round(time.monotonic() - started, 1)
        manifest = {
            "models": [described.get(label) or _described(label, materials, steps[label]) for label in used],
            "seed": study.seed,
            "versions": {name: version(name) for name in ("headscope", "torch", "transformers", "pandas", "pyarrow")},
            "hardware": _hardware(),
            "git_commit": _git_commit(),
            "timings": {"seconds": seconds, "cells_done_now": len(todo), "cells": len(plan)},
        }
        return writer.commit([f"{name}/{cell.id}" for name, cell in plan], manifest)


@contextmanager
def _interruptible(writer: RunWriter) -> Iterator[RunWriter]:
    """Use a writer; Ctrl-C becomes Interrupted, which tells what is kept."""
    try:
        with writer:
            yield writer
    except KeyboardInterrupt as stop:
        if writer.committed:
            said = f"interrupted, but the run is finished: {writer.final}"
        elif writer.partial.is_dir():
            said = f"interrupted; finished cells are kept in {writer.partial}: add --resume"
        else:
            said = "interrupted before the first cell was finished; nothing is kept"
        raise Interrupted(said) from stop


def _told(inputs: Mapping[str | None, Mapping[str, str]]) -> dict[str, str]:
    """Digests of what a run is made from, by what run.json and a user call it."""
    return {
        f"the {what}" + (f" of '{label}'" if label is not None else ""): digest
        for label, digests in inputs.items()
        for what, digest in digests.items()
    }


def _turns(materials: Materials) -> dict[str | None, tuple[int, int]]:
    """When each model has its turn: by the first mention of its checkpoint, then by its own."""
    given = materials.given
    checkpoint_of = {
        label: given[label].name if label in given else materials.specs[label].checkpoint for label in materials.labels
    }
    first = {checkpoint: turn for turn, checkpoint in enumerate(dict.fromkeys(checkpoint_of.values()))}
    return {label: (first[checkpoint], turn) for turn, (label, checkpoint) in enumerate(checkpoint_of.items())}


def _identified(label: str, spec: str, materials: Materials) -> str:
    given = materials.given.get(label)
    return spec if given is None else f"{spec}#{given.weights_sha256[:12]}"


def _step(label: str, materials: Materials) -> int | None:
    """The training step of a model's checkpoint, if it is one of many."""
    return training_step(materials.given[label].name if label in materials.given else materials.specs[label].checkpoint)


def _described(label: str, materials: Materials, step: int | None) -> dict[str, Any]:
    """What run.json tells of one model; `step` is its checkpoint's."""
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
        "step": step if learned is None else learned.step,
        "geometry": {"layers": model.geometry.layers, **asdict(model.geometry)},
        "dtype": str(model.module.dtype).removeprefix("torch."),
    }


def _hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cpus": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that headscope runs from; None for an installed package."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
