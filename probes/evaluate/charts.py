"""What a report shows of tasks, and the sentence that says how to read each chart."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.content import Chart, Group, Shown
from probes.evaluate import PROBE, figures
from probes.evaluate.found import reported


def charts(shown: Shown) -> Iterator[Group]:
    """The table models x tasks and, where tasks were made to several lengths, their scores by length."""
    tasks = shown.table("tasks")
    if tasks is not None and len(tasks):
        yield Group(PROBE.title, "How well each model does", _scores(tasks))


def _scores(tasks: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        figures.table(tasks),
        "A cell is the score of a model on a task, with the standard error over documents below; under the task its "
        "metric and the length that a model may read. Deeper blue is higher within a column. Models answered the same "
        "documents, so a difference between two is surer than their standard errors tell.",
    )
    if figures.several_lengths(reported(tasks)):
        yield Chart(
            figures.by_length(tasks),
            "Score against the length that the task was made to; bars are one standard error.",
        )
