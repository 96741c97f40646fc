"""The cell runner: sections yield cells, an engine makes table rows of them, each is stored as it finishes.

Measuring and every probe run through here. Cells that are already stored are skipped, so an interrupted run goes on
where it stopped. Of every model that is used the runner itself stores the position parameters.
"""

import logging
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headscope import plugins
from headscope.errors import BadInput, Interrupted
from headscope.positions.model import Model
from headscope.runs.run import Run, unfinished
from headscope.runs.writer import RunWriter
from headscope.study import engines
from headscope.study.cells import Cell
from headscope.study.checkpoint_glob import training_step
from headscope.study.config import Study
from headscope.study.context import Materials
from headscope.study.executor import POSITIONS, Job, Maker, describe, hardware
from headscope.study.progress import Progress, Silent
from headscope.study.timings import Spent

log = logging.getLogger("headscope")


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
        raise BadInput(f"the study has no section: add one of {', '.join(plugins.probes())}")
    works = engines.engine(study.engine)
    materials = Materials(study, given or {}, progress)
    maker = Maker(materials)
    plan = planned(maker)
    used = maker.used
    for label in used:
        materials.identify(label)
    config = study.model_dump(mode="json", exclude_none=True)
    config["models"] = {label: _identified(label, study.models[label], materials) for label in used}
    started = time.monotonic()
    with _interruptible(RunWriter.open(Path(out), study.name, config, resume)) as writer:
        if resume and (finished := writer.finished(_told(materials.inputs))) is not None:
            log.info("this run is finished already, and nothing was measured again: %s", finished.path)
            return finished
        if resume and not any(writer.cells.iterdir()):
            for name, cells in unfinished(out).items():
                if cells and name.startswith(f"{study.name}-"):
                    log.warning("%s is unfinished, but of other options than these: this run starts anew", name)
        writer.compare(_told(materials.inputs))
        materials.files = writer.files
        materials.stored, materials.tables = writer.stored, writer.tables
        todo = [job for job in plan if not writer.done(job.id)]
        # Grouped by checkpoint, so that each is loaded once. What is merely read off comes last: a mistake that shows
        # when a model is first run leaves nothing behind.
        turn = _turns(materials)
        todo.sort(key=lambda job: (*turn.get(job.cell.model, (-1, -1)), job.section == POSITIONS))
        described: dict[str | None, Mapping[str, Any]] = {}
        spent = Spent()
        whole = sum(job.cell.cost for job in plan)
        progress.start(whole, whole - sum(job.cell.cost for job in todo))
        try:
            with closing(works.make(todo, maker, progress)) as work:
                for job, made in work:
                    writer.note(_told(made.inputs))
                    writer.add(job.id, made.rows)
                    spent.add(job, made)
                    if made.described is not None:
                        described[job.cell.model] = made.described
                    progress.done(job.cell.cost - made.advanced)
        finally:
            progress.stop()
        seconds = round(time.monotonic() - started, 1)
        manifest = {
            "models": [described.get(label) or describe(label, materials) for label in used],
            "seed": study.seed,
            "versions": {name: version(name) for name in ("headscope", "torch", "transformers", "pandas", "pyarrow")},
            "hardware": {**hardware(), **works.told},
            "git_commit": _git_commit(),
            "timings": {"seconds": seconds, "cells_done_now": len(todo), "cells": len(plan)},
            "spent": spent.told(),
        }
        return writer.commit([job.id for job in plan], manifest)


def planned(maker: Maker) -> list[Job]:
    """Every cell of a study, in the order of the stored rows; from here on the maker knows which models are used."""
    sections = [(name, section) for name, section in maker.sections.items() if name != POSITIONS]
    measuring = [Job(name, cell) for name, section in sections for cell in section.cells()]
    labels = maker.materials.labels
    maker.used = [label for label in labels if any(job.cell.model == label for job in measuring)]
    for label in maker.used:
        training_step(maker.materials.checkpoint(label))  # one that cannot be read is told before any work
    positions = [Job(POSITIONS, Cell(f"{label}: {POSITIONS}", label, 0.0)) for label in maker.used]
    return positions + measuring


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
    checkpoint_of = {label: materials.checkpoint(label) for label in materials.labels}
    first = {checkpoint: turn for turn, checkpoint in enumerate(dict.fromkeys(checkpoint_of.values()))}
    return {label: (first[checkpoint], turn) for turn, (label, checkpoint) in enumerate(checkpoint_of.items())}


def _identified(label: str, spec: str, materials: Materials) -> str:
    given = materials.given.get(label)
    return spec if given is None else f"{spec}#{given.weights_sha256[:12]}"


def _git_commit() -> str | None:
    """The commit of the checkout that headscope runs from; None for an installed package."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
