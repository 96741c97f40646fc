"""Executes jobs: opens the model of a job and turns its cells into table rows, in whatever process it runs."""

import logging
import math
import platform
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from headscope.attention.kernels.runtime import describe_kernels
from headscope.base import plugins
from headscope.compat.torch import cpu_flash_attention
from headscope.compat.transformers import COMMIT_HASH
from headscope.errors import BadInput
from headscope.forward.observe import observe
from headscope.models.bridge import describe_bridge
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import PRETRAINING_KEY, Model
from headscope.runs.arrow import Rows
from headscope.study import process_memory
from headscope.study.cells import Job, ObservingRunner, PassCell, ProbeRunner, RunnerParts, group_by_pass
from headscope.study.context import OTHER_WEIGHTS, StudyContext
from headscope.study.digests import library_versions

log = logging.getLogger("headscope")

GEOMETRY_KEYS = {
    "layer_numbers": "numbers",
    "rotary_layout": "layout",
    "layer_rotates": "rotates",
    "rotation_direction": "direction",
}
"""Keys of run.json for fields of Geometry that have another name."""


@dataclass(frozen=True)
class JobResult:
    """What a job produced.

    `rows` by table; `input_digests` of everything it read, by label ("" for all models) and input; `completed_cost`,
    how much of its cost was reported as progress while it ran; `model_description` for run.json, from probes that run
    for every model;
    `seconds` of the work itself and `opening_seconds` of opening the checkpoint before it; `cells_ahead`, how many
    further cells it computed beside its own; `peak_bytes` of memory of the process; `versions` of its libraries.
    """

    rows: Mapping[str, Rows]
    input_digests: Mapping[str, Mapping[str, str]]
    completed_cost: float
    model_description: Mapping[str, Any] | None
    seconds: float = 0.0
    opening_seconds: float = 0.0
    cells_ahead: int = 0
    peak_bytes: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)


Results = Generator[tuple[Job, JobResult], None, None]
"""Jobs with their results, as they finish."""


class JobExecutor:
    """Executes jobs with at most one checkpoint in memory. `used_labels` are the models that some cell needs."""

    def __init__(self, context: StudyContext) -> None:
        self.context = context
        self.used_labels: Sequence[str] = context.labels
        self.runners: dict[str, Any] = {}
        self._warned_labels: set[str] = set()
        for name, probe in plugins.probes().items():
            options = context.study.probe_options.get(name)
            if options is not None or probe.runs_always:
                self.runners[name] = plugins.call_part(probe, RunnerParts.runner)(options, context)

    def plan(self) -> list[Job]:
        """All jobs of the study, in the order of the stored rows. Sets `used_labels`.

        Raises BadInput for a study without a probe.
        """
        if not self.context.study.probe_options:
            raise BadInput(f"the study requests no probe. Add one of: {', '.join(plugins.requestable_probes())}")
        requested = [(name, runner) for name, runner in self.runners.items() if not plugins.probes()[name].runs_always]
        cells = [(name, cell) for name, runner in requested for cell in runner.cells()]
        requested_labels = {cell.model for _, cell in cells}
        self.used_labels = [label for label in self.context.labels if label in requested_labels]
        for label in self.used_labels:
            if label in self.context.specs:
                _ = self.context.specs[label].step  # reports an unreadable step before any work
        jobs = group_by_pass(cells, self.context.labels)
        lengths: dict[str, set[int]] = {label: set() for label in self.used_labels}
        for job in jobs:
            lengths.setdefault(job.model, set()).add(job.length)
        for label in self.used_labels:
            self.context.measured_lengths[label] = tuple(sorted(lengths[label] - {0}))
        always = [
            Job(((name, cell),))
            for name, runner in self.runners.items()
            if plugins.probes()[name].runs_always
            for cell in runner.cells()
            if cell.model in requested_labels
        ]
        return always + jobs

    def execute(self, job: Job) -> JobResult:
        """Run a job. Raises what its runner raises, and BadInput for a position scheme that its model cannot have."""
        context, label = self.context, job.model
        context.completed_cost, context.cells_ahead, context.shared_jobs = 0.0, 0, job.shared_jobs
        began = time.monotonic()
        model = context.model(label) if label else None
        if label:  # refuse an impossible scheme before another model of this checkpoint is measured
            for other in self._labels_by_checkpoint[context.checkpoint_name(label)]:
                _ = context.model(other).schedule
        if model is not None:
            self._warn_beyond_native(job, model)
        ready = time.monotonic()
        rows = self._rows(job, model)
        finished = time.monotonic()
        digests = {key: dict(context.input_digests[key]) for key in {label, ""}}
        describes = bool(label) and runs_always(job)
        return JobResult(
            rows=rows,
            input_digests=digests,
            completed_cost=context.completed_cost,
            cells_ahead=context.cells_ahead,
            model_description=describe_model(label, context) if describes else None,
            seconds=finished - ready,
            opening_seconds=ready - began,
            peak_bytes=peak_bytes(),
            versions=dict(library_versions()),
        )

    @cached_property
    def _labels_by_checkpoint(self) -> dict[str, list[str]]:
        """The models that some cell needs, by the name of their checkpoint."""
        labels: dict[str, list[str]] = {}
        for label in self.used_labels:
            labels.setdefault(self.context.checkpoint_name(label), []).append(label)
        return labels

    def _warn_beyond_native(self, job: Job, model: Model) -> None:
        """Warn once per model of a context that is longer than the one it was trained for, without a scheme."""
        native, original, length = model.geometry.native_context, model.geometry.original_context, job.length
        if 0 < native < length and model.scheme == "base" and job.model not in self._warned_labels:
            self._warned_labels.add(job.model)
            log.warning(
                "model '%s' was trained for %s tokens, and %s are longer than that. Without a position scheme it may "
                "fail there for that reason alone; add one, e.g. @yarn:factor=%d",
                *(job.model, f"{native:,}", f"contexts of {length:,}", math.ceil(length / original)),
            )

    def _rows(self, job: Job, model: Model | None) -> Mapping[str, Rows]:
        name, cell = job.parts[0]
        if model is None or not isinstance(cell, PassCell):
            runner: ProbeRunner = self.runners[name]
            return runner.compute_rows(cell, model)
        observing: list[tuple[ObservingRunner, Any]] = [(self.runners[name], cell) for name, cell in job.parts]
        ids = torch.tensor(observing[0][0].token_ids(cell))
        factories = [partial(runner.observer, cell, model) for runner, cell in observing]
        return {table: rows for tables in observe(model, ids, factories) for table, rows in tables.items()}


def runs_always(job: Job) -> bool:
    """Whether the job belongs to a probe that runs for every model without being requested."""
    return plugins.probes()[job.parts[0][0]].runs_always


def describe_model(label: str, context: StudyContext) -> dict[str, Any]:
    """The entry of one model in run.json, without the digests of its tokenizer and texts."""
    model, spec = context.model(label), context.specs.get(label)
    adapter = model.schedule if isinstance(model.schedule, AdaRoPE) else None
    identity = model.identity
    if spec is not None:
        spec = replace(spec, scheme=model.scheme_spec)
    step = None if spec is None else spec.step
    if adapter is not None and (step is None or spec is None or spec.has_step_in_adapter):
        step = adapter.step
    return {
        "label": label,
        "spec": context.study.models[label],
        "checkpoint": model.name,
        "bridge": describe_bridge(model.bridge),
        "lora": None if spec is None else spec.lora,
        "revision": getattr(model.module.config, COMMIT_HASH, None),
        "weights_sha256": identity.weights.bfloat16,
        "scheme": model.scheme,
        "scheme_name": model.scheme_spec.name,
        "scheme_options": dict(model.scheme_spec.options),
        "adapter_sha256": identity.adapter,
        "training": None if spec is None else spec.training_run,
        "step": step,
        "pretraining": getattr(model.module.config, PRETRAINING_KEY, None),
        "geometry": describe_geometry(model),
        "dtype": identity.dtype,
        "identity": identity.to_dict(),
        "vocabulary": model.module.get_input_embeddings().weight.shape[0],
    }


def describe_geometry(model: Model) -> dict[str, Any]:
    """The geometry in run.json. Equal geometries of older runs do not have all fields with an entry per layer, so each
    is left out if all layers are alike, and the original context if it is the native one."""
    geometry = model.geometry
    fields = {GEOMETRY_KEYS.get(name, name): value for name, value in asdict(geometry).items()}
    for name in ("layer_kv_groups", "layer_heads", "layer_head_dims", "layer_pairs"):
        if len(set(fields[name])) == 1:
            del fields[name]
    if geometry.original_context == geometry.native_context:
        del fields["original_context"]
    return {"layers": geometry.layers, **fields}


def text_digests(inputs: Mapping[str, str]) -> dict[str, Any]:
    """The part of a model's entry in run.json about its tokenizer, texts, and heads of other models, from the digests
    of its inputs by name."""
    texts = {name: digest for name, digest in inputs.items() if name.startswith("texts of ")}
    prefix = f"{OTHER_WEIGHTS} "
    other_weights = {name.removeprefix(prefix): inputs[name] for name in inputs if name.startswith(prefix)}
    return {"tokenizer_sha256": inputs.get("tokenizer"), "texts_sha256": texts, "other_weights": other_weights}


def peak_bytes() -> float:
    """Largest memory use of this process so far, in bytes; on CUDA, that of all GPUs together."""
    if torch.cuda.is_available():
        return float(sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))))
    return process_memory.peak_bytes()


def hardware() -> dict[str, Any]:
    """The machine that this process runs on, for run.json."""
    return {
        "machine": platform.machine(),
        "cpus": torch.get_num_threads(),
        "fused_cpu_attention": cpu_flash_attention() is not None,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **describe_kernels(),
    }


@dataclass
class JobTimings:
    """How long the finished jobs took, by probe and model, for the cost estimates of other studies."""

    _sums: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    _opening: float = 0.0
    _peak: float = 0.0

    def add(self, job: Job, result: JobResult) -> None:
        self._opening += result.opening_seconds
        self._peak = max(self._peak, result.peak_bytes)
        if not runs_always(job):
            sums = self._sums.setdefault((job.probe, job.model), {"cells": 0, "cost": 0.0, "seconds": 0.0})
            for name, value in (("cells", 1), ("cost", job.cost), ("seconds", result.seconds)):
                sums[name] += value

    def to_dict(self) -> dict[str, Any]:
        """Timings for run.json: cells, cost and seconds by probe and model, seconds of opening checkpoints, and bytes
        of memory of the largest process."""
        rows = [
            {"probe": probe, "model": label or None, **{name: round(value, 3) for name, value in sums.items()}}
            for (probe, label), sums in self._sums.items()
        ]
        return {
            "by_probe": rows,
            "opening_seconds": round(self._opening, 3),
            "peak_bytes": round(self._peak),
        }
