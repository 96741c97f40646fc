"""The `evaluate` section: a cell is one model on one task (or one group that is more than a list) at one length."""

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
from probes.evaluate.options import EvaluateOptions

ASSUMED_DOCUMENTS = 500
"""Documents of a task that makes its own, and a guess for the time estimate of others."""
MIN_GENERATED_LENGTH = 1024
"""Tokens that every task made to a length fits into; below, the harness may look for a fitting text for ever."""
ASSUMED_DOCUMENT_TOKENS = 128
"""A guess at the tokens of a document that is not made to a length."""


class EvaluateRunner:
    """Cells by model, task and length; tasks that are not made to a length run once, in the longest."""

    def __init__(self, options: EvaluateOptions, context: StudyContext):
        self.options, self.context = options, context
        self.tasks = {task.name: task for task in harness.find_tasks(options.tasks)}
        short = [task.name for task in self.tasks.values() if task.is_generated_to_length and min(options.lengths) < MIN_GENERATED_LENGTH]
        if short:
            raise BadInput(f"task {short[0]} is made to a length and needs {MIN_GENERATED_LENGTH:,} tokens, not {min(options.lengths)}")
        for label in context.labels:
            # Where temperatures go by the whole text, keys of an answer's beginning do not serve its end.
            by = context.in_memory[label].schedule if label in context.in_memory else context.specs[label].rule
            if getattr(by, "by_sequence", False):
                raise BadInput(f"'{label}' cannot write answers under length=sequence: use length=visible")
        self._built_tasks: dict[tuple[str, int, str], dict[str, Any]] = {}
        context.record_input("lm-evaluation-harness", [version("lm_eval")])
        for task in self.tasks.values():
            if task.is_generated_to_length:
                context.record_input(f"task {task.name}", [json.dumps(task.config, default=str)])
            else:
                for name, documents, rules in harness.task_documents(self._build_task(task, max(options.lengths), None)):
                    if len(documents) < 2:
                        raise BadInput(f"task {name} has {len(documents)} documents: a standard error needs two")
                    context.record_input(
                        f"task {name}", (json.dumps(each, default=str) for each in [rules, *documents])
                    )

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
        tokenizer = copy.deepcopy(self.context.tokenizer(cell.model))  # the harness gives it a pad token
        ready = self._build_task(task, length, tokenizer if task.by_length else None)
        with attached(model):
            lm = harness.wrap_model(model.module, tokenizer, length)
            found = list(harness.score_tasks(lm, ready, self.options.documents, length if task.by_length else None))
        return {"tasks": pd.DataFrame([asdict(each) for each in found]).assign(model=cell.model, context_length=length)}

    def _build_task(self, task: Task, length: int, tokenizer: Any) -> dict[str, Any]:
        """The task, made once for all models that read it in the same tokens."""
        key = (task.name, length, digest_tokenizer(tokenizer) if tokenizer is not None else "")
        if key not in self._built_tasks:
            self._built_tasks[key] = harness.build_task(task, length, tokenizer)
        return self._built_tasks[key]

    def _cost(self, task: Task, length: int) -> float:
        count = self.options.documents or ASSUMED_DOCUMENTS
        return count * pass_cost(length if task.is_generated_to_length else ASSUMED_DOCUMENT_TOKENS)
