"""Results of the evaluate probe: the score of every model on each task, and means over tasks of one kind."""

from collections.abc import Iterator
from typing import Literal

from headscope.rendering.blocks import Overview
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.evaluate.analysis import (
    means_over_tasks,
    preferred_metric_rows,
    with_intervals,
)


def _score(name: str, better: Literal["higher", "lower"]) -> Question:
    return Question(
        name=name,
        sentence="{task} at {context_length:,} tokens ({metric}): {model} scores {value}, with a standard error of "
        "{stderr:.3f}",
        headline="{task} at {context_length:,} tokens ({metric}): {value}",
        number=".3f",
        samples="documents",
        level="headline",
        better=better,
    )


QUESTIONS = (
    Question(
        name="tasks.mean_score",
        sentence="Mean {kind} of {tasks:n tasks} at {context_length:,} tokens: {model} scores {value}",
        headline="mean {kind} of {tasks:n tasks} at {context_length:,} tokens: {value}",
        number=".3f",
        level="headline",
        better="higher",
    ),
    _score("tasks.score", "higher"),
    _score("tasks.error", "lower"),
)


def results(run: Run) -> Iterator[Result]:
    """The scores with their intervals over documents; the standard error of a mean assumes independent tasks."""
    if "tasks" not in run.tables:
        return
    rows = preferred_metric_rows(run.tasks)
    for row in means_over_tasks(rows).to_dict("records"):
        where = {name: row[name] for name in ("kind", "context_length")}
        yield Result(
            question="tasks.mean_score",
            model=str(row["model"]),
            value=row["score"],
            low=row["low"],
            high=row["high"],
            where=where,
            details={"tasks": row["tasks"]},
        )
    for row in with_intervals(rows).to_dict("records"):
        yield Result(
            question="tasks.score" if row["higher_is_better"] else "tasks.error",
            model=str(row["model"]),
            value=row["score"],
            low=row["low"],
            high=row["high"],
            n=int(row["documents"]),
            where={name: row[name] for name in ("task", "context_length", "metric")},
            details={"stderr": row["stderr"]},
        )


def overview(run: Run) -> Overview | None:
    """The scores by model, task and length, for JSON."""
    if "tasks" not in run.tables:
        return None
    return Overview("tasks", preferred_metric_rows(run.tasks))
