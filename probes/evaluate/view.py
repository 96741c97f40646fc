"""Charts and glossary of the evaluate probe."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, shapes, style
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.runs.aggregation import rows_at_longest_length
from probes.evaluate import PROBE
from probes.evaluate.results import (
    MAX_LENGTH_RATIO,
    PREFERRED_METRICS,
    means_over_tasks,
    preferred_metric_rows,
    summarise_heads,
)

TITLE = "Task scores"


def plot_score_table(tasks: pd.DataFrame) -> go.Figure:
    """Table of models x tasks with scores and standard errors; the last columns are means over tasks."""
    if reason := style.missing_data_reason(tasks, "model", "task", "context_length", "score", "stderr"):
        return style.empty_figure(TITLE, reason)
    rows = preferred_metric_rows(tasks)
    means = means_over_tasks(rows)
    means["task"] = "mean of " + means["tasks"].astype(str)
    cells = pd.concat([rows, means.rename(columns={"kind": "metric"})])
    cells["text"] = [f"{row.score:.3f}<br>±{row.stderr:.3f}" for row in cells.itertuples()]
    cells["column"] = [
        f"{style.escape_label(row.task)}<br>{style.escape_label(row.metric)}, {row.context_length:,}"
        for row in cells.itertuples()
    ]
    columns = list(cells["column"].unique())
    models = list(style.model_styles(rows))
    text, score = (
        cells.astype({"model": "str"}).pivot(index="model", columns="column", values=name).loc[models, columns]
        for name in ("text", "score")
    )
    # The colour scale is per column, from its worst to its best score, because metrics have different units.
    quality = score * np.where(cells.groupby("column")["higher_is_better"].first()[columns].eq(False), -1, 1)
    low, high = quality.min(), quality.max()
    return shapes.matrix(
        TITLE,
        ((quality - low) / (high - low).where(high > low, 1)).rename(style.escape_label),
        "%{y}, %{x}: %{text}",
        {"side": "top", "showgrid": False, "tickangle": 0, "tickfont_size": 11},
        {"autorange": "reversed", "showgrid": False},
        height=150 + 46 * len(models),
        top_margin=110,
        text=text.fillna("").to_numpy(),
        texttemplate="%{text}",
        # The page's text colour, in light and dark themes, because the cells are translucent.
        textfont={"color": style.TEXT_COLOUR},
        colorscale=[[0, "rgba(31,131,196,0.05)"], [1, "rgba(31,131,196,0.55)"]],
        colorbar=None,
        showscale=False,
        xgap=2,
        ygap=2,
    )


def plot_scores_by_length(tasks: pd.DataFrame) -> go.Figure:
    """Score by length of each task with several lengths; error bars are one standard error."""
    title = "Scores by length"
    if reason := style.missing_data_reason(tasks, "model", "task", "context_length", "score", "stderr"):
        return style.empty_figure(title, reason)
    rows = preferred_metric_rows(tasks)
    names = tasks_with_several_lengths(rows)
    if not names:
        return style.empty_figure(title, "no task has several lengths")
    figure = style.panel_figure(title, [style.escape_label(name) for name in names])
    for index, name in enumerate(names):
        task_rows = rows[rows["task"] == name]
        for label, model_style in style.model_styles(rows).items():
            line = task_rows[task_rows["model"] == label].set_index("context_length").sort_index()
            trace = shapes.line_trace(model_style, line[["score"]].set_axis(["y"], axis=1), "%{x:,} tokens: %{y:.3f}")
            legend = {"legendgroup": model_style.name, "showlegend": index == 0}
            error = {"error_y": {"array": line["stderr"], "thickness": 1, "width": 3}}
            figure.add_trace(trace | legend | error, **style.panel_row_col(index, names))
    figure.update_xaxes(**axes.length_axis(rows["context_length"]))
    figure.update_yaxes(rangemode="tozero")
    style.set_outer_axis_titles(figure, len(names), "length (tokens)", "score")
    return style.fit_legend(figure)


def plot_scores_against_heads(tasks: pd.DataFrame, head_summaries: pd.DataFrame) -> go.Figure:
    """Each task's score at its longest length against each number about the models' heads, a column of
    `head_summaries`.

    Only tasks whose score is a fraction of correct answers. Error bars are one standard error.
    """
    title = "Task scores against head statistics"
    if reason := style.missing_data_reason(tasks, "model", "task", "context_length", "score", "stderr"):
        return style.empty_figure(title, reason)
    rows = rows_at_longest_length(preferred_metric_rows(tasks), ["task"]).astype({"model": "str"})
    rows = rows[rows["metric"].isin(PREFERRED_METRICS)]  # they share an axis
    if rows.empty:
        return style.empty_figure(title, "no task is scored by the fraction of correct answers")
    symbols = {
        task: style.MARKER_SYMBOLS[index % len(style.MARKER_SYMBOLS)]
        for index, task in enumerate(rows["task"].unique())
    }
    model_styles = style.model_styles(tasks)
    figure = style.panel_figure(title, [style.escape_label(name, 44) for name in head_summaries])
    for index, name in enumerate(head_summaries):
        for label, model_style in model_styles.items():
            model_rows = rows[rows["model"] == label]
            figure.add_scatter(
                x=head_summaries[name].reindex(model_rows["model"]),
                y=model_rows["score"],
                error_y={"array": model_rows["stderr"], "thickness": 1, "width": 3},
                mode="markers",
                name=model_style.name,
                legendgroup=model_style.name,
                showlegend=index == 0,
                marker={
                    "color": model_style.colour,
                    "symbol": [symbols[task] for task in model_rows["task"]],
                    "size": 9,
                },
                customdata=[style.escape_label(task) for task in model_rows["task"]],
                hovertemplate=f"%{{customdata}}: %{{y:.3f}}, heads %{{x:.3g}}<extra>{model_style.name}</extra>",
                **style.panel_row_col(index, [*head_summaries]),
            )
    for task, symbol in symbols.items():
        marker = {"color": style.TEXT_COLOUR, "symbol": symbol, "size": 9}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=style.escape_label(task), marker=marker)
    figure.update_xaxes(matches=None, showticklabels=True)
    figure.update_yaxes(rangemode="tozero")
    style.set_outer_axis_titles(figure, len(head_summaries.columns), "", "score")
    return style.fit_legend(figure)


def tasks_with_several_lengths(rows: pd.DataFrame) -> list[str]:
    """Names of the tasks with scores at more than one length."""
    counts = rows.groupby("task", sort=False)["context_length"].nunique()
    return [str(name) for name in counts.index[counts > 1]]


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
        plot_score_table(tasks),
        "One cell per model and task: the score, with its standard error over documents below it. Below the task are "
        "its metric and the maximum context length. Deeper blue is better within a column. Models with the same "
        "tokenizer answered the same documents, so a difference between them is more certain than their standard "
        "errors suggest.",
    )
    if tasks_with_several_lengths(preferred_metric_rows(tasks)):
        yield Chart(
            plot_scores_by_length(tasks),
            "Score by the context length that the task was generated to; error bars are one standard error.",
        )


def _head_comparison_charts(tasks: pd.DataFrame, context: RenderContext) -> Iterator[Chart]:
    summaries = summarise_heads(context.heads)
    summaries = summaries[summaries.index.isin(tasks["model"].astype("str"))]
    if len(summaries) > 1 and len(summaries.columns):
        yield Chart(
            plot_scores_against_heads(tasks, summaries),
            "One point per model: its score on a task at the longest length, against one number about its heads. Error "
            f"bars are one standard error. Effective lengths count as the same within a factor of {MAX_LENGTH_RATIO}. "
            "A correlation over so few models is weak evidence, and it does not show a cause.",
        )
