"""Runs a study: plans its jobs, lets an engine execute them, and stores each result as it arrives.

Jobs that are already stored are skipped, so an interrupted run resumes where it stopped.
"""

import logging
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from headscope.base.output_files import check_run_folder
from headscope.base.signals import resume_advice
from headscope.errors import BadInput, Interrupted
from headscope.models.unsupported import refuse_autocast
from headscope.positions.model import Model
from headscope.runs.run import Run, unfinished_runs
from headscope.runs.writer import RunWriter
from headscope.study.cells import Job
from headscope.study.config import EngineOptions, Study
from headscope.study.context import StudyContext
from headscope.study.digests import check_versions, library_versions, other_versions
from headscope.study.executor import (
    JobExecutor,
    JobTimings,
    Results,
    describe_model,
    hardware,
    runs_always,
    text_digests,
)
from headscope.study.progress import NoProgress, Progress

log = logging.getLogger("headscope")


class Engine(Protocol):
    """Executes jobs and yields each result as soon as it is there. `description` goes into run.json."""

    description: Mapping[str, Any]

    def execute(self, jobs: Sequence[Job], executor: JobExecutor, progress: Progress) -> Results: ...


class LocalEngine:
    """Executes one job after another in this process."""

    description: Mapping[str, Any] = {}

    def execute(self, jobs: Sequence[Job], executor: JobExecutor, progress: Progress) -> Results:
        for job in jobs:
            progress.set_activity(job.cell.id)
            yield job, executor.execute(job)


def create_engine(options: EngineOptions) -> Engine:
    """The engine that a study requests. Raises ResourceMissing if it is not installed."""
    if options.name == "plain":
        return LocalEngine()
    from headscope.study.ray_engine import RayEngine

    return RayEngine(options)


@torch.inference_mode(False)  # estimates need gradients, also inside a caller's inference mode
def run_study(
    study: Study,
    out: Path | str = "runs",
    *,
    resume: bool = False,
    in_memory_models: Mapping[str, Model] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Execute every probe of a study into one run directory under `out` and return the run.

    `in_memory_models` are opened models by label. Raises BadInput, ResourceMissing and the like before any work is
    done; Interrupted on Ctrl-C, with every finished job kept for `resume`.
    """
    out = check_run_folder(out)
    refuse_autocast()
    _check_own_metrics(study, resume)
    progress = progress or NoProgress()
    engine = create_engine(study.engine)
    context = StudyContext(study, in_memory_models or {}, progress)
    executor = JobExecutor(context)
    plan = executor.plan()
    used = executor.used_labels
    for label in used:
        context.record_model_digests(label)
    config = study.model_dump(mode="json", exclude_none=True)
    config["models"] = {label: _identifying_spec(label, study.models[label], context) for label in used}
    started = time.monotonic()
    with _interruptible(RunWriter.open(out, study.name, config, resume), resume) as writer:
        if resume and (finished := writer.find_finished(_named_digests(context.input_digests))) is not None:
            log.info("the run is already finished; nothing was measured again: %s", finished.path)
            if others := other_versions(finished.manifest.get("versions", {})):
                log.warning(
                    "the finished run was measured with other versions (%s). Delete it to measure it again", others
                )
            return finished
        if resume and not any(writer.cells_folder.iterdir()):
            for name, cells in unfinished_runs(out).items():
                if cells and name.startswith(f"{study.name}-"):
                    log.warning("unfinished run %s used different options; starting a new run", name)
        writer.check_inputs(_named_digests(context.input_digests))
        check_versions(writer.stored_versions(), writer.partial_path)
        writer.record_versions(library_versions())
        context.files_folder = writer.files_folder
        context.read_stored, context.stored_tables = writer.read_stored, writer.stored_tables
        writer.record_plan(len(plan))
        pending = _execution_order([job for job in plan if not writer.is_done(job.id)], context)
        descriptions: dict[str, Mapping[str, Any]] = {}
        timings = JobTimings()
        total = sum(job.cost for job in plan)
        progress.start(total, total - sum(job.cost for job in pending))
        try:
            with closing(engine.execute(pending, executor, progress)) as results:
                for job, result in results:
                    writer.add(job.id, result.rows, _named_digests(result.input_digests), result.versions)
                    timings.add(job, result)
                    if result.model_description is not None:
                        descriptions[job.model] = result.model_description
                    progress.advance(job.cost - result.completed_cost)
        finally:
            progress.stop()
        for label in sorted(used, key=context.checkpoint_name):  # a checkpoint that others measured is opened once
            descriptions[label] = descriptions.get(label) or describe_model(label, context)
        seconds = round(time.monotonic() - started, 1)
        manifest = {
            "models": [
                {
                    **descriptions[label],
                    **text_digests(_recorded_digests(writer, label) | context.input_digests[label]),
                    "documents_sha256": dict(context.document_digests[label]),
                    "longest_context": max(context.measured_lengths[label], default=0),
                    "prompt_tokens": sorted(context.prompt_lengths[label]),
                    **_describe_bos(study, label, context, _recorded_digests(writer, label)),
                }
                for label in used
            ],
            "seed": study.seed,
            "versions": dict(library_versions()),
            "hardware": {**hardware(), **engine.description},
            "git_commit": _git_commit(),
            "timings": {
                "seconds": seconds,
                "cells_done_now": len(pending),
                "cells": len(plan),
                **timings.to_dict(),
            },
        }
        return writer.commit([job.id for job in plan], manifest)


def _check_own_metrics(study: Study, resume: bool) -> None:
    """Raise BadInput if a metric is a Python function and the study is resumed, or runs in other processes.

    A run stores the name of such a function only.
    """
    if not any(callable(getattr(options, "metric", None)) for options in study.probe_options.values()):
        return
    if resume:
        raise BadInput(
            "a metric of your own cannot be resumed: the stored run knows its name, not what it computes. Leave out "
            "resume"
        )
    if study.engine.name != "plain":
        raise BadInput('a metric of your own runs in this process only. Use engine="plain"')


def _execution_order(jobs: list[Job], context: StudyContext) -> list[Job]:
    """Jobs grouped by checkpoint, so that each checkpoint is loaded once.

    Jobs that run for every model come last, so that nothing is stored if the first forward pass fails.
    """
    checkpoint_of = {label: context.checkpoint_name(label) for label in context.labels}
    checkpoint_rank = {checkpoint: rank for rank, checkpoint in enumerate(dict.fromkeys(checkpoint_of.values()))}
    model_rank: dict[str, tuple[int, int]] = {
        label: (checkpoint_rank[checkpoint], rank) for rank, (label, checkpoint) in enumerate(checkpoint_of.items())
    }
    return sorted(jobs, key=lambda job: (*model_rank.get(job.model, (-1, -1)), runs_always(job)))


@contextmanager
def _interruptible(writer: RunWriter, resume: bool) -> Iterator[RunWriter]:
    """Use a writer; turn Ctrl-C into Interrupted with a message about what is kept."""
    try:
        with writer:
            yield writer
    except KeyboardInterrupt as stop:
        if writer.is_committed:
            message = f"interrupted, but the run is finished: {writer.final_path}"
        elif writer.partial_path.is_dir():
            message = f"interrupted; finished work items are kept in {writer.partial_path}. {resume_advice(resume)}"
        else:
            message = "interrupted before the first work item was finished; nothing is kept"
        raise Interrupted(message) from stop


def _named_digests(digests: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Input digests by the names that run.json and messages use, such as "the weights of 'base'"."""
    return {
        f"the {name}" + (f" of '{label}'" if label else ""): digest
        for label, by_name in digests.items()
        for name, digest in by_name.items()
    }


def _recorded_digests(writer: RunWriter, label: str) -> dict[str, str]:
    """Input digests of one label that the finished jobs recorded, by input.

    In a resumed run an earlier process may have read inputs that this one does not need.
    """
    prefix, suffix = "the ", f" of '{label}'"
    recorded: Mapping[str, str] = writer.draft.get("inputs", {})
    return {
        name.removeprefix(prefix).removesuffix(suffix): digest
        for name, digest in recorded.items()
        if name.endswith(suffix)
    }


def _identifying_spec(label: str, spec: str, context: StudyContext) -> str:
    model = context.in_memory_models.get(label)
    return spec if model is None else f"{spec}#{model.identity.weights.exact[:12]}"


def _describe_bos(study: Study, label: str, context: StudyContext, recorded: Mapping[str, str]) -> dict[str, Any]:
    """The choice of BOS and the special tokens before every text, for run.json; empty if nothing was tokenized."""
    if "tokenizer" not in {**recorded, **context.input_digests[label]}:
        return {}
    return {"bos": study.bos, "opening_tokens": context.opening_tokens(label)}


def _git_commit() -> str | None:
    """The commit of the checkout that headscope runs from; None for an installed package."""
    folder = Path(__file__).parent
    try:
        answer = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
