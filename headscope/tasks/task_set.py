"""The tasks of a probe: found by name or file, recorded as inputs of the run, and scored on each model."""

import copy
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from headscope.errors import BadInput
from headscope.positions.model import Model
from headscope.study.cells import pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import digest_tokenizer
from headscope.tasks import harness
from headscope.tasks.harness import Score, Task

ASSUMED_DOCUMENTS = 500
"""Documents of a generated task, and an estimate for other tasks; for the time estimate only."""
MIN_GENERATED_LENGTH = 1024
"""Tokens that are enough for every generated task; below, the harness may search for a fitting text forever."""
ASSUMED_DOCUMENT_TOKENS = 128
"""Estimate of the tokens of a document that is not generated to a length."""


class TaskSet:
    """Tasks of the harness at context lengths `lengths`; iterating gives each task.

    Tasks that are not generated to a length are scored once, at the largest. Raises BadInput for an unknown task, one
    without a standard error, a length too short for a generated task, and a scheme that cannot generate answers.
    """

    def __init__(self, specs: list[str], lengths: Sequence[int], trust_task_code: bool, context: StudyContext):
        self._lengths, self._context = lengths, context
        self._tasks = {task.name: task for task in harness.find_tasks(specs, trust_task_code)}
        self._built_tasks: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._refuse_short_lengths()
        self._refuse_schemes_of_the_whole_sequence()
        context.record_input("lm-evaluation-harness", [version("lm_eval")])
        for task in self:
            self._record_input(task)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __getitem__(self, name: str) -> Task:
        return self._tasks[name]

    def lengths(self, task: Task) -> Sequence[int]:
        """The context lengths at which a task is scored."""
        return self._lengths if task.is_generated_to_length else [max(self._lengths)]

    def cost(self, task: Task, length: int, limit: int | None) -> float:
        """Estimated cost of scoring a task once, as `pass_cost` counts it."""
        tokens = length if task.is_generated_to_length else ASSUMED_DOCUMENT_TOKENS
        return (limit or ASSUMED_DOCUMENTS) * pass_cost(tokens)

    def scores(self, model: Model, label: str, task: Task, length: int, limit: int | None) -> list[Score]:
        """Every metric of a task over at most `limit` documents, on a model whose position scheme is attached."""
        if self._context.study.bos != "auto":
            raise BadInput("'bos' has no effect on tasks of the harness, whose prompts are its own. Remove 'bos'")
        tokenizer = copy.deepcopy(self._context.tokenizer(label))  # the harness sets its pad token
        generated = task.is_generated_to_length
        built_tasks = self._build(task, length, tokenizer if generated else None)
        with harness.template_environment(task):
            harness_model = harness.wrap_model(model.module, tokenizer, length)
            return list(harness.score_tasks(harness_model, built_tasks, limit, length if generated else None))

    def _build(self, task: Task, length: int, tokenizer: Any) -> dict[str, Any]:
        """Build the task's documents, once for all models with the same tokenizer."""
        key = (task.name, length, digest_tokenizer(tokenizer) if tokenizer is not None else "")
        if key not in self._built_tasks:
            self._built_tasks[key] = harness.build_task(task, length, tokenizer)
        return self._built_tasks[key]

    def _record_input(self, task: Task) -> None:
        if task.is_generated_to_length:
            self._context.record_input(f"task {task.name}", [json.dumps(task.config, default=str)])
            return
        for name, documents, config in harness.task_documents(self._build(task, max(self._lengths), None)):
            if len(documents) < 2:
                raise BadInput(
                    f"task {name} has too few documents for a standard error ({len(documents)}). Remove the task"
                )
            content = (json.dumps(entry, default=str) for entry in [config, *documents])
            self._context.record_input(f"task {name}", content)

    def _refuse_short_lengths(self) -> None:
        generated = [task.name for task in self if task.is_generated_to_length]
        if generated and min(self._lengths) < MIN_GENERATED_LENGTH:
            raise BadInput(
                f"length {min(self._lengths)} is too short for task {generated[0]}, which is generated to a context "
                f"length. Use at least {MIN_GENERATED_LENGTH:,} tokens"
            )

    def _refuse_schemes_of_the_whole_sequence(self) -> None:
        """With a scale for the whole sequence, cached keys of an answer's beginning would be wrong for its end."""
        context = self._context
        for label in context.labels:
            in_memory = context.in_memory_models.get(label)
            scheme = context.schemes[label] if in_memory is None else in_memory.schedule
            if getattr(scheme, "uses_sequence_length", False):
                raise BadInput(f"model '{label}' cannot generate answers with length=sequence. Use length=visible")
