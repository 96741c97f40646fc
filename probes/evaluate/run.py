"""Runner of the evaluate probe: scores of the lm-evaluation-harness."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pandas as pd

from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell
from headscope.study.context import StudyContext
from headscope.tasks.harness import Task
from headscope.tasks.task_set import TaskSet
from probes.evaluate.declaration import EvaluateOptions


@dataclass(frozen=True)
class _TaskWork:
    """A task, and the largest context of its documents in tokens."""

    task: Task
    max_length: int

    @property
    def length(self) -> int:
        return self.max_length if self.task.is_generated_to_length else 0


class EvaluateRunner:
    """Cells: one per model, task (or group that aggregates its tasks) and length."""

    def __init__(self, options: EvaluateOptions, context: StudyContext):
        self.options, self.context = options, context
        self.tasks = TaskSet(options.tasks, options.lengths, options.trust_task_code, context)

    def cells(self) -> list[Cell]:
        limit = self.options.documents
        return [
            Cell(
                f"{label}: {task.name}, {length} tokens",
                label,
                self.tasks.cost(task, length, limit),
                _TaskWork(task, length),
            )
            for label in self.context.labels
            for task in self.tasks
            for length in self.tasks.lengths(task)
        ]

    def compute_rows(self, cell: Cell[_TaskWork], model: Model) -> Mapping[str, Rows]:
        task, length = cell.work.task, cell.work.max_length
        with attached(model):
            scores = self.tasks.scores(model, cell.model, task, length, self.options.documents)
        table = pd.DataFrame([asdict(score) for score in scores]).drop(columns="values")
        return {"tasks": table.assign(model=cell.model, context_length=length)}
