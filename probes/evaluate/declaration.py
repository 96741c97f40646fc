"""Options and stored table of the evaluate probe."""

from pydantic import Field, field_validator

from headscope.base.user_input import MAX_DOCUMENTS, MAX_LENGTH
from headscope.runs.columns import FILTER, LENGTH, METRIC, MODEL, TASK, Column, Table
from headscope.study.config import Options

SYNTHETIC_TASKS = ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"]
"""RULER tasks whose texts the harness generates, so that they need no network."""
MIN_LENGTH = 128


class EvaluateOptions(Options):
    """Scores of each model on tasks of the lm-evaluation-harness (needs the extra `eval`)."""

    tasks: list[str] = Field(
        SYNTHETIC_TASKS, description="harness tasks, groups or tags by name, or task files (.yaml)"
    )
    lengths: list[int] = Field(
        [4096], description="maximum context length in tokens; generated tasks have exactly this length"
    )
    documents: int | None = Field(
        None,
        ge=2,
        le=MAX_DOCUMENTS,
        description="maximum number of documents per task; default: all",
        json_schema_extra={"flags": ["--limit"]},
    )
    trust_task_code: bool = Field(
        False,
        description="run the Python code that your own task files name, and their templates without a sandbox; "
        "tasks of the harness need no trust",
    )

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        if not tasks or "" in tasks:
            raise ValueError(f"no task. Give the name of a task, e.g. {SYNTHETIC_TASKS[0]}, or a task file")
        return tasks

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, lengths: list[int]) -> list[int]:
        if not lengths:
            raise ValueError("no length. Give at least one")
        if min(lengths) < MIN_LENGTH:
            raise ValueError(f"length {min(lengths)} is too short for a task. Use at least {MIN_LENGTH} tokens")
        if max(lengths) > MAX_LENGTH:
            raise ValueError(f"length {max(lengths)} is too long. Use at most {MAX_LENGTH} tokens")
        return sorted(set(lengths))


TASKS = Table(
    "tasks",
    "scores of each model on tasks of the lm-evaluation-harness",
    (
        MODEL,
        TASK,
        LENGTH,
        METRIC,
        FILTER,
        Column("score", "value", "", "the metric over all documents, in the unit of the metric"),
        Column(
            "stderr",
            "value",
            "",
            "standard error of the score over documents: from the harness or, if it has none, from 1000 seeded "
            "bootstrap samples [ours]",
            0,
        ),
        Column("documents", "count", "documents", "scored documents", 1),
        Column("higher_is_better", "flag", "", "whether a higher score is better"),
    ),
)

TABLES = (TASKS,)
