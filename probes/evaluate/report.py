"""What a report shows of tasks, and the sentence that says how to read each chart."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Chart, ChartGroup, RenderContext
from probes.evaluate import PROBE, plots
from probes.evaluate.analysis import reported
from probes.evaluate.head_summaries import KEPT, of_models


def charts(shown: RenderContext) -> Iterator[ChartGroup]:
    """The table models x tasks, scores by length where there are several, and scores beside what heads do."""
    tasks = shown.table("tasks")
    if tasks is not None and len(tasks):
        yield ChartGroup(PROBE.title, "How well each model does", _scores(tasks))
        yield ChartGroup(PROBE.title, "Beside their heads", _beside(tasks, shown))


def _scores(tasks: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        plots.table(tasks),
        "A cell is the score of a model on a task, with the standard error over documents below; under the task its "
        "metric and the length that a model may read. Deeper blue is better within a column. Models of one tokenizer "
        "answered the same documents, so a difference between two is surer than their standard errors tell.",
    )
    if plots.several_lengths(reported(tasks)):
        yield Chart(
            plots.by_length(tasks),
            "Score against the length that the task was made to; bars are one standard error.",
        )


def _beside(tasks: pd.DataFrame, shown: RenderContext) -> Iterator[Chart]:
    numbers = of_models(shown.heads)
    scored = numbers[numbers.index.isin(tasks["model"].astype("str"))]
    if len(scored) > 1 and len(scored.columns):
        yield Chart(
            plots.against_heads(tasks, scored),
            "A point is a model: the share of right answers at the longest length, against its heads in one number. "
            f"Bars are one standard error. A length is kept if it changes by at most a factor of {KEPT}. Few models "
            "show what goes together, not what causes what.",
        )
