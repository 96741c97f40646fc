"""The cell runner: sections yield cells, a cell becomes table rows, each is stored as it finishes.

Measuring and every probe run through here. One checkpoint is in memory at a time; cells that are already
stored are skipped, so an interrupted run goes on where it stopped.
"""

import importlib
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from headscope import checkpoints, models
from headscope.config import SECTIONS, Study
from headscope.errors import BadInput, Interrupted
from headscope.models import Model
from headscope.positions import AdaRoPE, parse, resolve
from headscope.progress import Progress, Silent
from headscope.steps import training_step
from headscope.store import Run, RunWriter
from headscope.tables import Rows
from headscope.texts import TokenDocument, documents


@dataclass(frozen=True)
class Cell:
    """The smallest unit of work that is stored and resumed: what to do, and with which model (by label) if any.

    `id` names it within the run; `cost` is its share of the work in any unit, for the time estimate.
    """

    id: str
    model: str | None
    cost: float = 1.0
    task: Any = None


class Section(Protocol):
    """One section of a study. Cells come in the order of the stored rows; one without a model gets None."""

    def __init__(self, study: Study, library: "Library") -> None: ...

    def cells(self) -> list[Cell]: ...

    def rows(self, cell: Cell, model: Any) -> Mapping[str, Rows]: ...


@dataclass
class Library:
    """Opens what a study names: models, one checkpoint at a time, and documents, by each model's own tokenizer.

    `given` holds models that came in memory, by label; `files` is where a section keeps what no table holds.
    `stored(cell, table)` reads a finished cell, "section/id", back.
    """

    study: Study
    given: Mapping[str, Model] = field(default_factory=dict)
    progress: Progress = field(default_factory=Silent)
    files: Path = Path()
    advanced: float = 0.0
    stored: Callable[[str, str], pd.DataFrame] = field(init=False)
    _open: tuple[str, Model] | None = None
    _tokenizers: dict[str, Any] = field(default_factory=dict)
    _documents: dict[tuple[int, int], list[TokenDocument]] = field(default_factory=dict)

    def model(self, label: str) -> Model:
        """The model of that label; the one opened before is dropped unless it shares the checkpoint."""
        if label in self.given:
            return self.given[label]
        checkpoint, scheme = models.split_spec(self.study.models[label])
        if self._open is None or self._open[0] != checkpoint:
            self._open = None
            self._open = (checkpoint, models.load(checkpoint, device=self.study.device, dtype=self.study.dtype))
        return self._open[1].with_scheme(scheme)

    def advance(self, cost: float, doing: str) -> None:
        """Tell of progress within a long cell: a share of its cost, and what is being done."""
        self.advanced += cost
        self.progress.done(cost)
        self.progress.doing(doing)

    def documents(self, label: str, length: int) -> list[TokenDocument]:
        """The study's documents in this model's tokens, each exactly `length` long.

        Every length takes the documents that hold the longest one, so lengths are compared on the same texts.
        """
        tokenizer = self.tokenizer(label)
        key = (id(tokenizer), length)
        if key not in self._documents:
            texts = self.study.texts
            self._documents[key] = documents(texts.source, tokenizer, texts.docs, length, self.study.seed)
        return self._documents[key]

    def tokenizer(self, label: str) -> Any:
        """The tokenizer of the model of that label, which need not be open."""
        if label in self.given:
            if self.given[label].tokenizer is None:
                raise BadInput(f"model '{label}' came without a tokenizer: hs.load(model, tokenizer=...)")
            return self.given[label].tokenizer
        checkpoint = models.split_spec(self.study.models[label])[0]
        if checkpoint not in self._tokenizers:
            self._tokenizers[checkpoint] = checkpoints.load_tokenizer(checkpoint)
        return self._tokenizers[checkpoint]


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
        raise BadInput(f"the study has no section: add one of {', '.join(SECTIONS)}")
    library = Library(study, given or {}, progress)
    for label, spec in study.models.items():
        if label not in library.given:
            parse(models.split_spec(spec)[1])
    sections = {name: section(name)(study, library) for name in study.sections}
    plan = [(name, cell) for name, section in sections.items() for cell in section.cells()]
    used = {label: spec for label, spec in study.models.items() if any(cell.model == label for _, cell in plan)}
    config = study.model_dump(mode="json", exclude_none=True)
    config["models"] = {label: _identified(label, spec, library) for label, spec in used.items()}
    started = time.monotonic()
    with RunWriter.open(Path(out), study.name, config, resume) as writer:
        library.files = writer.files
        library.stored = writer.stored
        # Grouped by checkpoint, so that each is loaded once.
        turn = _turns(study)
        todo = [(name, cell) for name, cell in plan if not writer.done(f"{name}/{cell.id}")]
        todo.sort(key=lambda item: turn.get(item[1].model, (-1, -1)))
        progress.start(sum(cell.cost for _, cell in plan), sum(c.cost for _, c in plan) - sum(c.cost for _, c in todo))
        try:
            for name, cell in todo:
                progress.doing(cell.id)
                library.advanced = 0.0
                model = None if cell.model is None else library.model(cell.model)
                writer.add(f"{name}/{cell.id}", sections[name].rows(cell, model))
                progress.done(cell.cost - library.advanced)
            described = [_described(label, study, library) for label in used]
        except KeyboardInterrupt as stop:
            raise Interrupted(f"interrupted; finished cells are kept in {writer.partial}: add --resume") from stop
        finally:
            progress.stop()
        seconds = round(time.monotonic() - started, 1)
        manifest = {
            "models": described,
            "seed": study.seed,
            "versions": {name: version(name) for name in ("headscope", "torch", "transformers", "pandas", "pyarrow")},
            "hardware": _hardware(),
            "git_commit": _git_commit(),
            "timings": {"seconds": seconds, "cells_done_now": len(todo), "cells": len(plan)},
        }
        return writer.commit([f"{name}/{cell.id}" for name, cell in plan], manifest)


def _turns(study: Study) -> dict[str | None, tuple[int, int]]:
    """When each model has its turn: by the first mention of its checkpoint, then by its own."""
    checkpoint_of = {label: models.split_spec(spec)[0] for label, spec in study.models.items()}
    first = {checkpoint: turn for turn, checkpoint in enumerate(dict.fromkeys(checkpoint_of.values()))}
    return {label: (first[checkpoint], turn) for turn, (label, checkpoint) in enumerate(checkpoint_of.items())}


def section(name: str) -> type[Section]:
    """The class that runs the section of that name, imported now."""
    module, _, attribute = SECTIONS[name].partition(":")
    found: type[Section] = getattr(importlib.import_module(module), attribute)
    return found


def _identified(label: str, spec: str, library: Library) -> str:
    given = library.given.get(label)
    return spec if given is None else f"{spec}#{given.weights_sha256[:12]}"


def _described(label: str, study: Study, library: Library) -> dict[str, Any]:
    """What run.json tells of one model."""
    model = library.model(label)
    schedule = resolve(model, None)
    learned = schedule if isinstance(schedule, AdaRoPE) else None
    folder = Path(models.split_spec(study.models[label])[0]).expanduser()
    step = training_step(folder) if folder.is_dir() else None
    return {
        "label": label,
        "spec": study.models[label],
        "checkpoint": model.checkpoint,
        "weights_sha256": model.weights_sha256,
        "scheme": model.scheme,
        "adapter_sha256": None if learned is None else learned.sha256,
        "step": step if learned is None else learned.step,
        "geometry": asdict(model.geometry),
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
