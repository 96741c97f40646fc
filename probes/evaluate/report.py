"""Report of the evaluate probe: charts and glossary."""

from collections.abc import Iterator

import pandas as pd

from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from probes.evaluate import PROBE, plots
from probes.evaluate.analysis import MAX_LENGTH_RATIO, preferred_metric_rows, summarise_heads

GLOSSARY = (
    Term(
        "Task",
        "A benchmark of the lm-evaluation-harness, which builds the prompts and scores the answers. RULER's tasks hide "
        "facts in generated text of a given context length; their score is the fraction of the expected strings in the "
        "answer.",
        tables=("tasks",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The table of scores, scores by length for tasks with several lengths, and scores against head statistics."""
    tasks = context.table("tasks")
    if tasks is not None and len(tasks):
        yield ChartGroup(PROBE.title, "Scores by model and task", _score_charts(tasks))
        yield ChartGroup(PROBE.title, "Task scores against head statistics", _head_comparison_charts(tasks, context))


def _score_charts(tasks: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        plots.plot_score_table(tasks),
        "One cell per model and task: the score, with its standard error over documents below it. Below the task are "
        "its metric and the maximum context length. Deeper blue is better within a column. Models with the same "
        "tokenizer answered the same documents, so a difference between them is more certain than their standard "
        "errors suggest.",
    )
    if plots.tasks_with_several_lengths(preferred_metric_rows(tasks)):
        yield Chart(
            plots.plot_scores_by_length(tasks),
            "Score by the context length that the task was generated to; error bars are one standard error.",
        )


def _head_comparison_charts(tasks: pd.DataFrame, context: RenderContext) -> Iterator[Chart]:
    summaries = summarise_heads(context.heads)
    summaries = summaries[summaries.index.isin(tasks["model"].astype("str"))]
    if len(summaries) > 1 and len(summaries.columns):
        yield Chart(
            plots.plot_scores_against_heads(tasks, summaries),
            "One point per model: its score on a task at the longest length, against one number about its heads. Error "
            f"bars are one standard error. Effective lengths count as the same within a factor of {MAX_LENGTH_RATIO}. "
            "A correlation over so few models is weak evidence, and it does not show a cause.",
        )
