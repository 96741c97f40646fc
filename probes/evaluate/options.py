"""Which tasks, how long, how many documents of each."""

from pydantic import Field, field_validator

from headscope.study.config import Options

SYNTHETIC_TASKS = ["niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_cwe", "ruler_fwe"]
"""RULER's tasks whose texts the harness makes itself, so that they need no network."""
MIN_LENGTH = 128


class EvaluateOptions(Options):
    """Tasks of the lm-evaluation-harness (the extra `eval`), scored by the harness on each model."""

    tasks: list[str] = Field(
        SYNTHETIC_TASKS, description="names of the harness's tasks, groups or tags, or task files (.yaml)"
    )
    lengths: list[int] = Field(
        [4096], description="tokens that a model may read; tasks that are made to a length are made to this one"
    )
    documents: int | None = Field(
        None,
        ge=2,
        description="at most this many documents of each task; default: all",
        json_schema_extra={"flags": ["--limit"]},
    )

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        if not tasks or "" in tasks:
            raise ValueError(f"name a task, e.g. {SYNTHETIC_TASKS[0]}, or a task file")
        return tasks

    @field_validator("lengths")
    @classmethod
    def _check_lengths(cls, lengths: list[int]) -> list[int]:
        if not lengths:
            raise ValueError("give a length")
        if min(lengths) < MIN_LENGTH:
            raise ValueError(f"length {min(lengths)} is too short for a task: give at least {MIN_LENGTH} tokens")
        return sorted(set(lengths))
