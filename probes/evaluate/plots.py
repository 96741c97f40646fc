"""Scores of tasks: the table models x tasks, and each task by length."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.aggregation import rows_at_longest_length
from probes.evaluate.analysis import PREFERRED_METRICS, means_over_tasks, preferred_metric_rows

TITLE = "Scores of tasks"


def plot_score_table(tasks: pd.DataFrame) -> go.Figure:
    """Models x tasks, each cell with its score and standard error; means over tasks follow."""
    if why := style.missing_data_reason(tasks, "model", "task", "context_length", "score", "stderr"):
        return style.empty_figure(TITLE, why)
    rows = preferred_metric_rows(tasks)
    over = means_over_tasks(rows)
    over["task"] = "mean of " + over["tasks"].astype(str)
    every = pd.concat([rows, over.rename(columns={"kind": "metric"})])
    every["shown"] = [f"{row.score:.3f}<br>±{row.stderr:.3f}" for row in every.itertuples()]
    every["column"] = [
        f"{style.escape_label(row.task)}<br>{style.escape_label(row.metric)}, {row.context_length:,}"
        for row in every.itertuples()
    ]
    across = list(every["column"].unique())
    models = list(style.model_styles(rows))
    shown, score = (
        every.astype({"model": "str"}).pivot(index="model", columns="column", values=name).loc[models, across]
        for name in ("shown", "score")
    )
    # A column's colours run from its worst to its best score: metrics have their own units.
    best = score * np.where(every.groupby("column")["higher_is_better"].first()[across].eq(False), -1, 1)
    low, high = best.min(), best.max()
    made = style.new_figure(TITLE, 150 + 46 * len(models))
    made.add_heatmap(
        x=across,
        y=[style.escape_label(label) for label in models],
        z=((best - low) / (high - low).where(high > low, 1)).to_numpy(),
        text=shown.fillna("").to_numpy(),
        texttemplate="%{text}",
        textfont={"color": style.TEXT_COLOUR},  # the page's own ink on light and on dark: the cells are translucent
        hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        colorscale=[[0, "rgba(31,131,196,0.05)"], [1, "rgba(31,131,196,0.55)"]],
        showscale=False,
        xgap=2,
        ygap=2,
    )
    made.update_xaxes(side="top", showgrid=False, tickangle=0, tickfont_size=11)
    made.update_yaxes(autorange="reversed", showgrid=False)
    return made.update_layout(margin_t=110)


def plot_scores_by_length(tasks: pd.DataFrame) -> go.Figure:
    """Each task that was made to several lengths: score against length, bars of one standard error."""
    title = "Scores by length"
    if why := style.missing_data_reason(tasks, "model", "task", "context_length", "score", "stderr"):
        return style.empty_figure(title, why)
    rows = preferred_metric_rows(tasks)
    names = tasks_with_several_lengths(rows)
    if not names:
        return style.empty_figure(title, "every task has one length")
    made = style.panel_figure(title, [style.escape_label(name) for name in names])
    for at, name in enumerate(names):
        mine = rows[rows["task"] == name]
        for label, look in style.model_styles(rows).items():
            line = mine[mine["model"] == label].sort_values("context_length")
            made.add_scatter(
                x=line["context_length"],
                y=line["score"],
                error_y={"array": line["stderr"], "thickness": 1, "width": 3},
                mode="lines+markers",
                name=look.name,
                legendgroup=look.name,
                showlegend=at == 0,
                line={"color": look.colour, "dash": look.dash},
                marker={"symbol": look.symbol, "size": 6},
                hovertemplate=f"%{{x:,}} tokens: %{{y:.3f}}<extra>{look.name}</extra>",
                **style.panel_row_col(at, names),
            )
    made.update_xaxes(**axes.length_axis(rows["context_length"]))
    made.update_yaxes(rangemode="tozero")
    style.set_outer_axis_titles(made, len(names), "length (tokens)", "score")
    return made


def plot_scores_against_heads(tasks: pd.DataFrame, head_summaries: pd.DataFrame) -> go.Figure:
    """Each task's score at its longest length against each number of the models' heads, a column of `numbers`.

    Of tasks whose score is a share. Bars are one standard error.
    """
    title = "Scores of tasks beside heads"
    if why := style.missing_data_reason(tasks, "model", "task", "context_length", "score", "stderr"):
        return style.empty_figure(title, why)
    rows = rows_at_longest_length(preferred_metric_rows(tasks), ["task"]).astype({"model": "str"})
    rows = rows[rows["metric"].isin(PREFERRED_METRICS)]  # they share an axis
    if rows.empty:
        return style.empty_figure(title, "no task is scored by the share of right answers")
    symbols = {
        task: style.MARKER_SYMBOLS[at % len(style.MARKER_SYMBOLS)] for at, task in enumerate(rows["task"].unique())
    }
    looks = style.model_styles(tasks)
    made = style.panel_figure(title, [style.escape_label(name, 44) for name in head_summaries])
    for at, name in enumerate(head_summaries):
        for label, look in looks.items():
            mine = rows[rows["model"] == label]
            made.add_scatter(
                x=head_summaries[name].reindex(mine["model"]),
                y=mine["score"],
                error_y={"array": mine["stderr"], "thickness": 1, "width": 3},
                mode="markers",
                name=look.name,
                legendgroup=look.name,
                showlegend=at == 0,
                marker={"color": look.colour, "symbol": [symbols[task] for task in mine["task"]], "size": 9},
                customdata=[style.escape_label(task) for task in mine["task"]],
                hovertemplate=f"%{{customdata}}: %{{y:.3f}}, heads %{{x:.3g}}<extra>{look.name}</extra>",
                **style.panel_row_col(at, [*head_summaries]),
            )
    for task, symbol in symbols.items():
        marker = {"color": style.TEXT_COLOUR, "symbol": symbol, "size": 9}
        made.add_scatter(x=[None], y=[None], mode="markers", name=style.escape_label(task), marker=marker)
    made.update_xaxes(matches=None, showticklabels=True)
    made.update_yaxes(rangemode="tozero")
    style.set_outer_axis_titles(made, len(head_summaries.columns), "", "score")
    return made


def tasks_with_several_lengths(rows: pd.DataFrame) -> list[str]:
    """Tasks that were scored at more than one length."""
    counts = rows.groupby("task", sort=False)["context_length"].nunique()
    return [str(name) for name in counts.index[counts > 1]]
