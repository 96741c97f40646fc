"""Interface to the lm-evaluation-harness: its tasks by name or file, and their scores on a loaded model.

Prompts, scoring and standard errors are the harness's own, with the seeds of its command line. A score is therefore
equal to that of `python -m lm_eval --tasks TASK --batch_size 1` on the same model with the same `max_length` and, for a
task generated to a context length, with that length in its `--metadata`. The harness makes no network requests of its
own: telemetry is off, nltk downloads nothing, and no tokenizer is loaded by name.

A user's own task file may come from somebody else. Unless it is trusted, it may not name Python code, and its templates
are rendered in Jinja's sandbox. Tasks of the harness are as trusted as the harness.
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
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from headscope.base import input_files, user_input
from headscope.compat import lm_eval as compat
from headscope.errors import (
    BadInput,
    HeadscopeError,
    IncompatibleLibrary,
    ResourceMissing,
    did_you_mean,
    missing_package,
)
from headscope.study.digests import digest_tokenizer

if TYPE_CHECKING:
    from headscope.compat.lm_eval import Entry

for _name, _value in {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "DO_NOT_TRACK": "1"}.items():
    os.environ.setdefault(_name, _value)

try:
    import nltk
    from jinja2 import TemplateError
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import tasks as harness_tasks
    from lm_eval.api.group import Group
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
    from transformers import AutoTokenizer
except ImportError as error:
    raise ResourceMissing(f"tasks need {missing_package(error)}. Run pip install 'headscope[eval]'") from error

log = logging.getLogger("headscope")
TASKS_FOLDER = Path(harness_tasks.__file__).parent
RULER_FOLDER = TASKS_FOLDER / "ruler"
PYTHON_SEED, OTHER_SEED = 0, 1234
"""Default seeds of the harness."""
BOOTSTRAP_SAMPLES = 1000
TASK_ERRORS = (ValueError, AssertionError, TypeError, LookupError, AttributeError, TemplateError)
"""Errors of the harness for a task whose fields or documents do not fit together."""


@dataclass(frozen=True)
class Task:
    """A task in the harness's `index`, not yet built.

    `config` is the content of its file; `is_generated_to_length` says whether its texts are generated to a context
    length; `is_sandboxed`, whether its templates are rendered in a sandbox.
    """

    name: str
    entry: "Entry"
    config: Mapping[str, Any]
    is_generated_to_length: bool
    index: Mapping[str, "Entry"]
    is_sandboxed: bool = False


@dataclass(frozen=True)
class Score:
    """One metric of one task, over `documents` documents; `values` is what the harness aggregates, one per document."""

    task: str
    metric: str
    filter: str
    score: float
    stderr: float
    documents: int
    higher_is_better: bool
    values: tuple[Any, ...]


def find_tasks(specs: list[str], trust_task_code: bool = False) -> list[Task]:
    """Find tasks by name or file; a group or tag that only lists tasks stands for each of them.

    Raises BadInput for an unknown task, and for a file that names Python code unless `trust_task_code` is set. The
    harness's whole index takes about ten seconds to read, so it is not read for RULER's tasks and task files.
    """
    with harness_silenced():
        build_index = compat.TASK_INDEX.resolve().build
        index = build_index([RULER_FOLDER])
        if any(not _is_task_file(spec) and spec not in index for spec in specs):
            index = build_index([TASKS_FOLDER])
    tasks = [task for spec in specs for task in _expand_task_spec(spec, index, trust_task_code)]
    return list({task.name: task for task in tasks}.values())


def build_task(task: Task, length: int, tokenizer: Any) -> dict[str, Any]:
    """Build the harness's task objects, by name; generated tasks have `length` tokens of `tokenizer`.

    Raises ResourceMissing if data or a package is not on this machine, BadInput if the task cannot be used.
    """
    # The harness imports the modules of its tasks again, so the tokenizer is patched in at its source. The harness
    # caches tokenizers by name.
    meta = (
        {"max_seq_lengths": [length], "tokenizer": digest_tokenizer(tokenizer)} if task.is_generated_to_length else {}
    )
    _seed_generators()
    try:
        with (
            harness_silenced(),
            template_environment(task),
            mock.patch.object(AutoTokenizer, "from_pretrained", return_value=tokenizer),
        ):
            built = compat.TASK_FACTORY.resolve()(meta=meta).build(task.entry, registry=dict(task.index))
    except IncompatibleLibrary:
        raise
    except Exception as reason:  # third-party data and code can fail in any way
        raise _task_error(task.name, reason) from reason
    tasks = built.get_all_tasks() if isinstance(built, Group) else built if isinstance(built, list) else [built]
    for member in tasks:
        if member.get_config("num_fewshot") is None:
            member.set_config(key="num_fewshot", value=0)
    return {member.task_name: member for member in tasks}


def task_documents(tasks: Mapping[str, Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Name, documents and config of each task; the config has prompts, metrics and the source code of its functions."""
    for name, task in tasks.items():
        yield name, list(task.eval_docs), task.dump_config()


def wrap_model(module: Any, tokenizer: Any, length: int) -> LM:
    """Wrap a loaded model for the harness: one sequence at a time, at most `length` tokens."""
    with harness_silenced():
        return HFLM(pretrained=module, tokenizer=tokenizer, batch_size=1, max_length=length)


def score_tasks(harness_model: LM, tasks: Mapping[str, Any], limit: int | None, length: int | None) -> Iterator[Score]:
    """Every metric of the tasks; of tasks generated to `length`, only the metric of that length, named "match"."""
    _seed_generators()
    for task in tasks.values():
        task.set_fewshot_seed(seed=OTHER_SEED)
    for name, task in tasks.items():
        try:
            with harness_silenced(), _captured_truncation_warnings() as truncations:
                output = evaluate(harness_model, {"tasks": {name: task}}, limit=limit, log_samples=True)
        except (*TASK_ERRORS, ImportError, OSError) as reason:
            raise _task_error(name, reason) from reason
        if truncations:
            log.warning(
                "%s prompts of task %s were too long; their beginning was cut off. Use a larger --length",
                len(truncations),
                name,
            )
        results = output["results"][name]
        for key, value in results.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or (length is not None and metric != str(length)):
                continue
            error = results[f"{metric}_stderr,{filter_name}"]
            samples = [sample[metric] for sample in output["samples"][name] if sample["filter"] == filter_name]
            if not isinstance(error, float):
                error = _bootstrap_standard_error(tasks[name].aggregation()[metric], samples)
            yield Score(
                name,
                "match" if length is not None else metric,
                filter_name,
                float(value),
                error,
                len(samples),
                bool(output["higher_is_better"][name].get(metric, True)),
                tuple(samples),
            )


@contextmanager
def harness_silenced() -> Iterator[None]:
    """Suppress the harness's output, logs, progress bars and nltk downloads."""
    logger = logging.getLogger("lm_eval")
    level, init_bar = logger.level, tqdm.__init__

    def init_disabled_bar(bar: Any, *args: Any, **kwargs: Any) -> None:
        init_bar(bar, *args, **{**kwargs, "disable": True})

    logger.setLevel(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(tqdm, "__init__", init_disabled_bar),
            mock.patch.object(nltk, "download", return_value=False),
        ):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _captured_truncation_warnings() -> Iterator[list[str]]:
    """Collect the harness's warnings about prompts that it truncates from the left."""
    warnings: list[str] = []

    class _Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if re.search("left", record.getMessage(), re.IGNORECASE):
                warnings.append(record.getMessage())

    logger, collector = logging.getLogger(HFLM.__module__), _Collector()
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield warnings
    finally:
        logger.propagate = True
        logger.removeHandler(collector)
        logger.setLevel(level)


@contextmanager
def template_environment(task: Task) -> Iterator[None]:
    """Render the templates of a sandboxed task without access to Python's internals."""
    if not task.is_sandboxed:
        yield
        return
    plain = compat.TEMPLATE_ENVIRONMENT.resolve()
    sandbox = SandboxedEnvironment(
        loader=plain.loader, undefined=plain.undefined, keep_trailing_newline=plain.keep_trailing_newline
    )
    sandbox.filters.update(plain.filters)
    with compat.TEMPLATE_ENVIRONMENT.replacing(sandbox):
        yield


def _expand_task_spec(spec: str, index: Mapping[str, "Entry"], trust_task_code: bool) -> Iterator[Task]:
    is_file = _is_task_file(spec)
    if is_file:
        entry, config = _read_task_file(spec, trust_task_code)
    elif spec in index:
        entry = index[spec]
        config = (
            compat.LOAD_YAML.resolve()(entry.yaml_path, resolve_func=False, recursive=True) if entry.yaml_path else {}
        )
    else:
        raise BadInput(
            f"unknown task '{spec}'{did_you_mean(spec, index)}. Use a task of the harness, or a task file that ends in "
            ".yaml"
        )
    members = sorted(entry.tags) if entry.kind is compat.ENTRY_KIND.resolve().TAG else config.get("task")
    if isinstance(members, list) and all(isinstance(member, str) and member in index for member in members):
        for member in members:
            yield from _expand_task_spec(member, index, trust_task_code)
    else:
        metrics = config.get("metric_list") or []
        is_generated_to_length = any(str(metric.get("metric")).isdigit() for metric in metrics)
        is_sandboxed = is_file and not trust_task_code
        yield Task(entry.name, entry, config, is_generated_to_length, index, is_sandboxed)


def _is_task_file(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


def _read_task_file(spec: str, trust_task_code: bool) -> tuple["Entry", dict[str, Any]]:
    """A user's task file and its content. Raises BadInput if it is invalid, or names code that is not trusted."""
    path = user_input.expand_path(spec, "task file")
    if not path.is_file():
        raise ResourceMissing(f"no task file at {user_input.quote(spec)}. Check the path")
    source_name = f"task file {user_input.quote(spec)}"

    def refuse_function(_: Any, node: Any) -> None:
        raise _untrusted(f"Python code with '!function {node.value}'")

    functions = compat.FUNCTION_CONSTRUCTOR.resolve() if trust_task_code else lambda *_: refuse_function
    try:
        input_files.check_yaml_size(path.read_text(encoding="utf-8"))
        with compat.FUNCTION_CONSTRUCTOR.replacing(functions):
            entry = compat.TASK_INDEX.resolve().entry_from_path(path)
            config = compat.LOAD_YAML.resolve()(path, resolve_func=False)
    except IncompatibleLibrary:
        raise
    except HeadscopeError as error:
        raise BadInput(f"{source_name}: {error}") from error
    except Exception as reason:  # the harness decides what a file may contain
        message = " ".join(str(reason).split())[:200].rstrip(".")
        raise BadInput(f"{source_name} is invalid: {message}. Correct the file") from reason
    if entry is None:
        raise BadInput(f"{source_name} names no task. Add the key 'task'")
    if entry.kind is compat.ENTRY_KIND.resolve().GROUP:
        if not isinstance(config.get("task"), list):
            raise BadInput(
                f"{source_name}: the key 'task' of a group is {user_input.quote(config.get('task'))}. Write a list"
            )
        entry.name = config["group"]
    if not isinstance(entry.name, str):
        raise BadInput(f"{source_name}: its name is {user_input.quote(entry.name)}, not a string. Write task: NAME")
    metrics = config.get("metric_list") or []
    if not isinstance(metrics, list) or not all(isinstance(metric, dict) for metric in metrics):
        raise BadInput(
            f"{source_name}: its metric_list is {user_input.quote(metrics)}. Write a list of '- metric: NAME'"
        )
    for metric in metrics:
        name = metric.get("metric")
        if not trust_task_code and (metric.get("hf_evaluate") or str(name) not in compat.METRICS.resolve()):
            metric_code = f"the metric {user_input.quote(name)}, which is not one of the harness"
            raise BadInput(f"{source_name}: {_untrusted(metric_code)}")
    return entry, config


def _untrusted(code: str) -> BadInput:
    return BadInput(f"it loads {code}. Read that code, then add --trust-task-code to run it")


def _seed_generators() -> None:
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)


def _bootstrap_standard_error(aggregate: Any, samples: list[Any]) -> float:
    """Bootstrap standard error of an aggregate over documents."""
    resamples = np.random.default_rng(0).integers(len(samples), size=(BOOTSTRAP_SAMPLES, len(samples)))
    return float(np.std([aggregate([samples[index] for index in indices]) for indices in resamples], ddof=1))


def _task_error(task: str, reason: Exception) -> ResourceMissing | BadInput:
    details = " ".join(f"{type(reason).__name__}: {reason}".split())[:250]
    if isinstance(reason, ImportError):
        return ResourceMissing(f"task {task} needs {missing_package(reason)}. Install it, or remove the task")
    if isinstance(reason, OSError):  # no network, no such file
        return ResourceMissing(
            f"task {task} needs data that is not available ({details}). Download it, or remove the task"
        )
    return BadInput(f"task {task} cannot be used ({details}). Correct or remove it")
