"""What a report shows of tasks, and the sentence that says how to read each chart."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Chart, ChartGroup, RenderContext
from probes.evaluate import PROBE, plots
from probes.evaluate.analysis import preferred_metric_rows
from probes.evaluate.head_summaries import MAX_LENGTH_RATIO, summarise_heads


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The table models x tasks, scores by length where there are several, and scores beside what heads do."""
    tasks = context.table("tasks")
    if tasks is not None and len(tasks):
        yield ChartGroup(PROBE.title, "How well each model does", _score_charts(tasks))
        yield ChartGroup(PROBE.title, "Beside their heads", _head_comparison_charts(tasks, context))


def _score_charts(tasks: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        plots.plot_score_table(tasks),
        "A cell is the score of a model on a task, with the standard error over documents below; under the task its "
        "metric and the length that a model may read. Deeper blue is better within a column. Models of one tokenizer "
        "answered the same documents, so a difference between two is surer than their standard errors tell.",
    )
    if plots.tasks_with_several_lengths(preferred_metric_rows(tasks)):
        yield Chart(
            plots.plot_scores_by_length(tasks),
            "Score against the length that the task was made to; bars are one standard error.",
        )


def _head_comparison_charts(tasks: pd.DataFrame, context: RenderContext) -> Iterator[Chart]:
    numbers = summarise_heads(context.heads)
    scored = numbers[numbers.index.isin(tasks["model"].astype("str"))]
    if len(scored) > 1 and len(scored.columns):
        yield Chart(
            plots.plot_scores_against_heads(tasks, scored),
            "A point is a model: the share of right answers at the longest length, against its heads in one number. "
            f"Bars are one standard error. A length is kept if it changes by at most a factor of {MAX_LENGTH_RATIO}. Few models "
            "show what goes together, not what causes what.",
        )
