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
from headscope.study.context import Materials
from headscope.study.digests import of_tokenizer
from probes.evaluate import harness
from probes.evaluate.harness import Task
from probes.evaluate.options import Evaluate

MANY = 500
"""Documents of a task that makes its own, and a guess for the time estimate of others."""
LEAST = 1024
"""Tokens that every task made to a length fits into; below, the harness may look for a fitting text for ever."""
SHORT = 128
"""A guess at the tokens of a document that is not made to a length."""


class EvaluateSection:
    """Cells by model, task and length; tasks that are not made to a length run once, in the longest."""

    def __init__(self, config: Evaluate, materials: Materials):
        self.config, self.materials = config, materials
        self.tasks = {task.name: task for task in harness.named(config.tasks)}
        short = [task.name for task in self.tasks.values() if task.by_length and min(config.lengths) < LEAST]
        if short:
            raise BadInput(f"task {short[0]} is made to a length and needs {LEAST:,} tokens, not {min(config.lengths)}")
        for label in materials.labels:
            # Where temperatures go by the whole text, keys of an answer's beginning do not serve its end.
            by = materials.given[label].schedule if label in materials.given else materials.specs[label].rule
            if getattr(by, "by_sequence", False):
                raise BadInput(f"'{label}' cannot write answers under length=sequence: use length=visible")
        self._made: dict[tuple[str, int, str], dict[str, Any]] = {}
        materials.uses("lm-evaluation-harness", [version("lm_eval")])
        for task in self.tasks.values():
            if task.by_length:
                materials.uses(f"task {task.name}", [json.dumps(task.rules, default=str)])
            else:
                for name, documents, rules in harness.documents(self._ready(task, max(config.lengths), None)):
                    if len(documents) < 2:
                        raise BadInput(f"task {name} has {len(documents)} documents: a standard error needs two")
                    materials.uses(f"task {name}", (json.dumps(each, default=str) for each in [rules, *documents]))

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{label}: {task.name}, {length} tokens", label, self._cost(task, length), (task, length))
            for label in self.materials.labels
            for task in self.tasks.values()
            for length in (self.config.lengths if task.by_length else [max(self.config.lengths)])
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        task, length = cell.task
        tokenizer = copy.deepcopy(self.materials.tokenizer(cell.model))  # the harness gives it a pad token
        ready = self._ready(task, length, tokenizer if task.by_length else None)
        with attached(model):
            lm = harness.language_model(model.module, tokenizer, length)
            found = list(harness.scores(lm, ready, self.config.documents, length if task.by_length else None))
        return {"tasks": pd.DataFrame([asdict(each) for each in found]).assign(model=cell.model, context_length=length)}

    def _ready(self, task: Task, length: int, tokenizer: Any) -> dict[str, Any]:
        """The task, made once for all models that read it in the same tokens."""
        key = (task.name, length, of_tokenizer(tokenizer) if tokenizer is not None else "")
        if key not in self._made:
            self._made[key] = harness.made(task, length, tokenizer)
        return self._made[key]

    def _cost(self, task: Task, length: int) -> float:
        count = self.config.documents or MANY
        return count * pass_cost(length if task.by_length else SHORT)
