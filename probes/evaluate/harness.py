"""The lm-evaluation-harness, kept at arm's length: its tasks by name or file, and their scores on an opened model.

Prompts, scoring and standard errors are the harness's own, seeded as its command line seeds them, so a task scored here
gives what `python -m lm_eval --tasks TASK --batch_size 1` gives on the same model with the same `max_length`, and, of a
task made to a length, with that length among its `--metadata`. What the harness would fetch on its
own account, it does not: telemetry is off, nltk downloads nothing, and no tokenizer is opened by name.
"""

import contextlib
import io
import logging
import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from headscope import user_input
from headscope.errors import BadInput, Missing, nearest
from headscope.study.digests import digest_tokenizer

for _name, _value in {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "DO_NOT_TRACK": "1"}.items():
    os.environ.setdefault(_name, _value)

try:
    import nltk
    from lm_eval import tasks as shipped
    from lm_eval.api.group import Group
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks._index import Entry, Kind, TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml
    from tqdm import tqdm
    from transformers import AutoTokenizer
except ImportError as error:
    raise Missing(f"evaluate needs the lm-evaluation-harness ({error}); run `pip install 'headscope[eval]'`") from error

log = logging.getLogger("headscope")
TASKS_FOLDER = Path(shipped.__file__).parent
RULER_FOLDER = TASKS_FOLDER / "ruler"
PYTHON_SEED, OTHER_SEED = 0, 1234
"""The harness's defaults."""
BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True)
class Task:
    """A task as the harness has it in its `index`, not yet made, with the `rules` that its file holds. `by_length`: its
    texts are made to a length."""

    name: str
    entry: Entry
    config: Mapping[str, Any]
    is_generated_to_length: bool
    index: Mapping[str, Entry]


@dataclass(frozen=True)
class Score:
    """One metric of one task over `documents` of them."""

    task: str
    metric: str
    filter: str
    score: float
    stderr: float
    documents: int
    higher_is_better: bool


def find_tasks(specs: list[str]) -> list[Task]:
    """The tasks of those names or files; a group or tag that only lists tasks gives each. BadInput for an unknown one.

    Reading the harness's whole index takes some ten seconds, so RULER and files do without it.
    """
    with harness_silenced():
        index = TaskIndex.build([RULER_FOLDER])
        if any(not _is_task_file(spec) and spec not in index for spec in specs):
            index = TaskIndex.build([TASKS_FOLDER])
    found = [task for spec in specs for task in _expand_task_spec(spec, index)]
    return list({task.name: task for task in found}.values())


def build_task(task: Task, length: int, tokenizer: Any) -> dict[str, Any]:
    """The task's documents and rules, by name; those made to a length, in tokens of `tokenizer`.

    Raises Missing where data or a package is not on this machine, BadInput for what cannot be used.
    """
    # The harness reads the modules of its tasks anew, so what they ask is answered where they all ask it. It keeps
    # a tokenizer by its name.
    meta = {"max_seq_lengths": [length], "tokenizer": digest_tokenizer(tokenizer)} if task.is_generated_to_length else {}
    _seed_generators()
    try:
        with harness_silenced(), mock.patch.object(AutoTokenizer, "from_pretrained", return_value=tokenizer):
            built = TaskFactory(meta=meta).build(task.entry, registry=dict(task.index))
    except Exception as reason:  # somebody else's data and code can fail in any way
        raise _task_error(task.name, reason) from reason
    each = built.get_all_tasks() if isinstance(built, Group) else built if isinstance(built, list) else [built]
    for one in each:
        if one.get_config("num_fewshot") is None:
            one.set_config(key="num_fewshot", value=0)
    return {one.task_name: one for one in each}


def task_documents(tasks: Mapping[str, Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """The documents of each task, after its name and before its rules: prompts, metrics, sources of its functions."""
    for name, task in tasks.items():
        yield name, list(task.eval_docs), task.dump_config()


def wrap_model(module: Any, tokenizer: Any, length: int) -> LM:
    """An opened model as the harness takes it: one sequence at a time, of at most `length` tokens."""
    with harness_silenced():
        return HFLM(pretrained=module, tokenizer=tokenizer, batch_size=1, max_length=length)


def score_tasks(harness_model: LM, tasks: Mapping[str, Any], limit: int | None, length: int | None) -> Iterator[Score]:
    """Every metric of the tasks; of those made to `length`, the one for it, called "match"."""
    _seed_generators()
    for task in tasks.values():
        task.set_fewshot_seed(seed=OTHER_SEED)
    for name, task in tasks.items():
        try:
            with harness_silenced(), _captured_truncation_warnings() as cuts:
                found = evaluate(harness_model, {"tasks": {name: task}}, limit=limit, log_samples=True)
        except (ValueError, ImportError, OSError, AssertionError) as reason:
            raise _task_error(name, reason) from reason
        if cuts:
            log.warning("%s prompts of %s were too long and lost their beginning: give more --length", len(cuts), name)
        results = found["results"][name]
        for at, value in results.items():
            metric, comma, filtered = at.partition(",")
            if not comma or metric.endswith("_stderr") or (length is not None and metric != str(length)):
                continue
            error = results[f"{metric}_stderr,{filtered}"]
            samples = [each[metric] for each in found["samples"][name] if each["filter"] == filtered]
            if not isinstance(error, float):
                error = _bootstrap_standard_error(tasks[name].aggregation()[metric], samples)
            yield Score(
                name,
                "match" if length is not None else metric,
                filtered,
                float(value),
                error,
                len(samples),
                bool(found["higher_is_better"][name].get(metric, True)),
            )


@contextmanager
def harness_silenced() -> Iterator[None]:
    """The harness prints, logs, draws bars and has nltk download; here it does none of it."""
    theirs = logging.getLogger("lm_eval")
    before, start = theirs.level, tqdm.__init__

    def unseen(bar: Any, *arguments: Any, **named: Any) -> None:
        start(bar, *arguments, **{**named, "disable": True})

    theirs.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(tqdm, "__init__", unseen),
            mock.patch.object(nltk, "download", return_value=False),
        ):
            yield
    finally:
        theirs.setLevel(before)


@contextmanager
def _captured_truncation_warnings() -> Iterator[list[str]]:
    """What the harness says of prompts that it cuts from the left to make them fit."""
    said: list[str] = []

    class _Cuts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search("left", record.getMessage(), re.IGNORECASE):
                said.append(record.getMessage())

    theirs, listening = logging.getLogger(HFLM.__module__), _Cuts()
    before = theirs.level
    theirs.setLevel(logging.WARNING)
    theirs.addHandler(listening)
    theirs.propagate = False
    try:
        yield said
    finally:
        theirs.propagate = True
        theirs.removeHandler(listening)
        theirs.setLevel(before)


def _expand_task_spec(spec: str, index: Mapping[str, Entry]) -> Iterator[Task]:
    entry = _read_task_file(spec) if _is_task_file(spec) else index.get(spec)
    if entry is None:
        raise BadInput(f"task '{spec}' is not known to the harness{nearest(spec, index)}; a task file ends in .yaml")
    rules = load_yaml(entry.yaml_path, resolve_func=False, recursive=True) if entry.yaml_path else {}
    members = sorted(entry.tags) if entry.kind is Kind.TAG else rules.get("task")
    if isinstance(members, list) and all(isinstance(each, str) and each in index for each in members):
        for member in members:
            yield from _expand_task_spec(member, index)
    else:
        metrics = rules.get("metric_list") or []
        yield Task(entry.name, entry, rules, any(str(each.get("metric")).isdigit() for each in metrics), index)


def _is_task_file(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


def _read_task_file(spec: str) -> Entry:
    path = user_input.expand_path(spec, "task file")
    if not path.is_file():
        raise Missing(f"no task file at '{spec}': check the path")
    try:
        entry = TaskIndex.entry_from_path(path)
    except Exception as reason:  # what a file may hold is the harness's to say
        raise BadInput(f"task file '{spec}' cannot be read: {' '.join(str(reason).split())[:200]}") from reason
    if entry is None:
        raise BadInput(f"task file '{spec}' names no task: it needs a key 'task'")
    return entry


def _seed_generators() -> None:
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)


def _bootstrap_standard_error(aggregate: Any, samples: list[Any]) -> float:
    """Standard error of an aggregate over documents, by the bootstrap."""
    draws = np.random.default_rng(0).integers(len(samples), size=(BOOTSTRAP_SAMPLES, len(samples)))
    return float(np.std([aggregate([samples[at] for at in draw]) for draw in draws], ddof=1))


def _task_error(task: str, reason: Exception) -> Missing | BadInput:
    said = " ".join(f"{type(reason).__name__}: {reason}".split())[:250]
    if isinstance(reason, ImportError):
        return Missing(f"task {task} needs a package that is not installed ({said}); install it or leave the task out")
    if isinstance(reason, OSError):  # no network, no such file
        return Missing(f"task {task} needs data that is not here and cannot be fetched ({said}); leave the task out")
    return BadInput(f"task {task} cannot be used: {said}")
