"""Runner of the evaluate probe: scores of the lm-evaluation-harness."""

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pandas as pd

from headscope.errors import BadInput
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from headscope.study.digests import digest_tokenizer
from probes.evaluate import harness
from probes.evaluate.harness import Task
from probes.evaluate.schema import EvaluateOptions

ASSUMED_DOCUMENTS = 500
"""Documents of a generated task, and an estimate for other tasks; for the time estimate only."""
MIN_GENERATED_LENGTH = 1024
"""Tokens that are enough for every generated task; below, the harness may search for a fitting text forever."""
ASSUMED_DOCUMENT_TOKENS = 128
"""Estimate of the tokens of a document that is not generated to a length."""


class EvaluateRunner:
    """Cells: one per model, task (or group that aggregates its tasks) and length.

    Tasks that are not generated to a length run once, at the largest.
    """

    def __init__(self, options: EvaluateOptions, context: StudyContext):
        self.options, self.context = options, context
        self.tasks = {task.name: task for task in harness.find_tasks(options.tasks, options.trust_task_code)}
        generated = [task.name for task in self.tasks.values() if task.is_generated_to_length]
        if generated and min(options.lengths) < MIN_GENERATED_LENGTH:
            raise BadInput(
                f"length {min(options.lengths)} is too short for task {generated[0]}, which is generated to a context "
                f"length. Use at least {MIN_GENERATED_LENGTH:,} tokens"
            )
        for label in context.labels:
            # With a scale for the whole sequence, cached keys of an answer's beginning would be wrong for its end.
            scheme = (
                context.in_memory_models[label].schedule
                if label in context.in_memory_models
                else context.schemes[label]
            )
            if getattr(scheme, "uses_sequence_length", False):
                raise BadInput(f"model '{label}' cannot generate answers with length=sequence. Use length=visible")
        self._built_tasks: dict[tuple[str, int, str], dict[str, Any]] = {}
        context.record_input("lm-evaluation-harness", [version("lm_eval")])
        for task in self.tasks.values():
            if task.is_generated_to_length:
                context.record_input(f"task {task.name}", [json.dumps(task.config, default=str)])
            else:
                built_tasks = self._build_task(task, max(options.lengths), None)
                for name, documents, config in harness.task_documents(built_tasks):
                    if len(documents) < 2:
                        raise BadInput(
                            f"task {name} has too few documents for a standard error ({len(documents)}). Remove "
                            "the task"
                        )
                    content = (json.dumps(entry, default=str) for entry in [config, *documents])
                    context.record_input(f"task {name}", content)

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{label}: {task.name}, {length} tokens", label, self._cost(task, length), (task, length))
            for label in self.context.labels
            for task in self.tasks.values()
            for length in (self.options.lengths if task.is_generated_to_length else [max(self.options.lengths)])
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        task, length = cell.task
        tokenizer = copy.deepcopy(self.context.tokenizer(cell.model))  # the harness sets its pad token
        generated = task.is_generated_to_length
        built_tasks = self._build_task(task, length, tokenizer if generated else None)
        with attached(model), harness.template_environment(task):
            harness_model = harness.wrap_model(model.module, tokenizer, length)
            metric_length = length if generated else None
            scores = list(harness.score_tasks(harness_model, built_tasks, self.options.documents, metric_length))
        return {
            "tasks": pd.DataFrame([asdict(score) for score in scores]).assign(model=cell.model, context_length=length)
        }

    def _build_task(self, task: Task, length: int, tokenizer: Any) -> dict[str, Any]:
        """Build the task's documents, once for all models with the same tokenizer."""
        key = (task.name, length, digest_tokenizer(tokenizer) if tokenizer is not None else "")
        if key not in self._built_tasks:
            self._built_tasks[key] = harness.build_task(task, length, tokenizer)
        return self._built_tasks[key]

    def _cost(self, task: Task, length: int) -> float:
        count = self.options.documents or ASSUMED_DOCUMENTS
        return count * pass_cost(length if task.is_generated_to_length else ASSUMED_DOCUMENT_TOKENS)
