"""Charts, tables, card and glossary of the budget probe."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, shapes, style
from headscope.plots.top_heads import fit_to_card
from headscope.rendering.blocks import Card, Chart, ChartGroup, RenderContext, Term, TextTable
from headscope.rendering.explorer_blocks import query_link
from headscope.rendering.text import format_cell
from headscope.results import words
from headscope.runs.aggregation import plain_types
from headscope.runs.run import Run
from probes.budget import PROBE
from probes.budget.analysis import (
    answer_changes,
    best_order,
    cache_sizes,
    curves,
    describe_window,
    loss_changes,
    loss_changes_by_position,
    order_label,
    streaming_groups,
    summaries,
    task_scores,
)
from probes.budget.declaration import ANSWERS, LOSS, SETTINGS, TASKS
from probes.budget.results import largest_share, order_results

MIB = 2**20


def plot_loss_curves(curves: pd.DataFrame, bound: float, title: str) -> go.Figure:
    """Change of the loss (nats/token) by share of streaming KV groups, one line per order; dotted: the bound."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    level = {"level": bound, "level_name": f"bound {bound:g}"}
    return _plot_curves(curves, title, "%{y:+.4f} nats/token", "change of the loss (nats/token)", **level)


def plot_answer_curves(curves: pd.DataFrame, column: str, title: str) -> go.Figure:
    """Success (0 to 1) or change of the answer's loss by share of streaming KV groups, one line per order."""
    if column == "nll":
        return _plot_curves(curves, title, "%{y:+.3f} nats/token", "change of the answer's loss (nats/token)")
    axis = {"title_text": "right answers", "tickformat": ".0%", "range": [-0.03, 1.03]}
    return _plot_curves(curves, title, "%{y:.0%}", axis)


def plot_task_curves(curves: pd.DataFrame, title: str) -> go.Figure:
    """Score on a task by share of streaming KV groups, one line per order."""
    return _plot_curves(curves, title, "%{y:.3f}", "score on the task")


def _plot_curves(curves: pd.DataFrame, title: str, hover: str, y: shapes.Axis, **level: Any) -> go.Figure:
    """A line with its 95 % confidence band per order, by share of streaming KV groups."""
    if reason := style.missing_data_reason(curves, "order", "share", "mean"):
        return style.empty_figure(title, reason)
    names = curves["order"].map(order_label)
    styled = {
        line_style: curves[names == label].set_index("share").sort_index()[["mean", "low", "high"]]
        for label, line_style in style.line_styles([*dict.fromkeys(names)]).items()
    }
    ticks = {"tickformat": ".0%", "tickvals": np.linspace(0, 1, 6).tolist(), "range": [-0.02, 1.02]}
    x = {"title_text": "KV groups that stream", **ticks}
    return shapes.bands(title, styled, f"%{{x:.1%}} stream: {hover}", x, y, **level)


def plot_loss_by_position(changes: pd.DataFrame, title: str) -> go.Figure:
    """Change of the loss (nats/token) by position, one line per share; `changes` has index position, columns share."""
    if changes.empty:
        return style.empty_figure(title, "no data to plot")
    by_share = {share: pd.DataFrame({"y": changes[share]}) for share in map(float, changes.columns) if share > 0}
    hover = "up to position %{x:,}: %{y:+.4f} nats/token<extra>%{fullData.name} stream</extra>"
    axis = shapes.position_axis(changes.index)
    return shapes.lines(title, _by_share(by_share, ""), hover, axis, "change of the loss (nats/token)")


def plot_cache_sizes(sizes: pd.DataFrame, title: str) -> go.Figure:
    """Size of the KV cache (MiB) by context length, one line per share of streaming KV groups, of one order."""
    if reason := style.missing_data_reason(sizes, "context_length", "share", "cache_bytes"):
        return style.empty_figure(title, reason)
    mebibytes = sizes.assign(y=sizes["cache_bytes"] / MIB).set_index("context_length").sort_index()
    by_share = {share: mebibytes[mebibytes["share"] == share][["y"]] for share in sorted(sizes["share"].unique())}
    hover = "%{x:,} tokens: %{y:.4g} MiB<extra>%{fullData.name} stream</extra>"
    y = {"title_text": "KV cache (MiB)", **axes.log_axis(mebibytes["y"])}
    return shapes.lines(title, _by_share(by_share, "circle"), hover, shapes.length_axis(sizes["context_length"]), y)


def _by_share(tables: Mapping[float, pd.DataFrame], symbol: str) -> shapes.Series:
    """The tables by the style of their share of streaming KV groups."""
    styles = style.ordered_styles([f"{100 * share:.3g} %" for share in tables], symbol)
    return dict(zip(styles.values(), tables.values(), strict=True))


GLOSSARY = (
    Term(
        "Streaming KV group and budget",
        "A streaming KV group keeps the keys and values of the first S and the last R tokens only, in their own "
        "positions (StreamingLLM, Xiao et al. 2024); the other groups keep all. KV groups start to stream in an order, "
        "the lowest scores first. The area under the curve of the change of the loss over the share that streams "
        "compares orders: lower is better. Measured orders: each half of the documents is judged with the order from "
        "the scores of the other half.",
        "query i sees keys j < S or i - j < R",
        (LOSS.name,),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Curves by order, their areas, loss by position, answers, and the size of the KV cache."""
    run = context.run
    if LOSS.name not in run.tables:
        return
    yield ChartGroup(PROBE.title, "Loss by share of streaming KV groups", _curve_charts(context))
    yield ChartGroup(PROBE.title, "KV groups that can stream", _streaming_tables(context))
    yield ChartGroup(PROBE.title, "Orders compared", _tables(context))
    if ANSWERS.name in run.tables:
        yield ChartGroup(PROBE.title, "Answers by share of streaming KV groups", _answer_charts(context))
    if TASKS.name in run.tables:
        yield ChartGroup(PROBE.title, "Scores on tasks by share of streaming KV groups", _task_charts(context))
    yield ChartGroup(PROBE.title, "Size of the KV cache", _cache_charts(context))


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """How many KV groups can stream, in the best order at the longest length."""
    if LOSS.name not in context.run.tables:
        return
    model_summaries = [*_summaries(context)]
    if not model_summaries:
        return
    model, length, rows, settings = max(model_summaries, key=lambda summary: summary[1])
    all_curves = curves(context.run.derived(loss_changes))
    part = all_curves[(all_curves["model"] == model) & (all_curves["context_length"] == length)]
    figure = plot_loss_curves(part, settings["bound"], f"Loss by share of streaming KV groups: {model}")
    yield Card(
        fit_to_card(figure),
        words.sentence(largest_share(context.run, rows)),
        half_width=True,
        question="How much of the KV cache can stream?",
        href=query_link(PROBE.path),
    )


def _summaries(context: RenderContext) -> Iterator[tuple[str, int, pd.DataFrame, pd.Series]]:
    """Model, context length, summaries of all orders and settings, of the models shown."""
    settings = plain_types(context.run.table(SETTINGS.name)).set_index("model")
    table = context.run.derived(summaries)
    groups: Any = table[table["model"].isin(list(context.models))].groupby(["model", "context_length"], sort=False)
    for (model, length), rows in groups:
        yield model, int(length), rows, settings.loc[model]


def _curve_charts(context: RenderContext) -> Iterator[Chart]:
    run = context.run
    all_curves = curves(run.derived(loss_changes))
    for model, length, rows, settings in _summaries(context):
        part = all_curves[(all_curves["model"] == model) & (all_curves["context_length"] == length)]
        best = best_order(rows)["order"]
        yield Chart(
            plot_loss_curves(part, settings["bound"], f"{model}, {length:,} tokens: loss by share"),
            f"Streaming KV groups keep {describe_window(settings)}; the KV groups with the lowest scores stream first. "
            "Lines are means over documents, bands their 95 % confidence intervals; random orders are averaged over "
            "draws. Measured orders: each half of the documents is judged with the order from the scores of the other "
            "half.",
            half_width=True,
        )
        yield Chart(
            plot_loss_by_position(
                loss_changes_by_position(run, model, length, best),
                f"{model}, {length:,} tokens: loss by position, order by {order_label(best)}",
            ),
            "One line per share of streaming KV groups, means over documents, against the same documents without "
            f"streaming. Up to position {int(settings['sink'] + settings['recent']):,} streaming hides nothing.",
            half_width=True,
        )


def _streaming_tables(context: RenderContext) -> Iterator[TextTable]:
    """The KV groups that can stream in the best order, by name, and what that costs."""
    body = [_streaming_row(context.run, model, length, rows) for model, length, rows, _ in _summaries(context)]
    if body:
        yield TextTable(
            "KV groups that can stream in the best order; L3G1 is KV group 1 of layer 3. They are those at the largest "
            "measured share within the mean largest share of the documents. Each half of the documents has its own "
            "order; the last column counts KV groups of only one order.",
            [
                "model",
                "context",
                "order",
                "largest share",
                "change of the loss (nats/token)",
                "KV groups",
                "KV groups in one half only",
            ],
            body,
        )


def _streaming_row(run: Run, model: str, length: int, rows: pd.DataFrame) -> list[str]:
    point, halves = streaming_groups(run, rows)
    first, *others = [set(half.itertuples(index=False, name=None)) for half in halves]
    both, either = first.intersection(*others), first.union(*others)
    names = ", ".join(f"L{layer}G{group}" for layer, group in sorted(both)) or "none"
    change = format_cell({"change": point["mean"], "change_low": point["low"], "change_high": point["high"]}, "change")
    share = words.cell(largest_share(run, rows))
    return [model, f"{length:,}", order_label(best_order(rows)["order"]), share, change, names, str(len(either - both))]


def _tables(context: RenderContext) -> Iterator[TextTable]:
    for model, length, rows, settings in _summaries(context):
        body = []
        for row in rows.to_dict("records"):
            cells = {name: words.cell(result) for name, result in order_results(context.run, row).items()}
            columns = ("area", "area_vs_random", "largest_share")
            body.append([order_label(row["order"]), *(cells.get(name, "–") for name in columns)])
        yield TextTable(
            f"{model}, {length:,} tokens. Area: mean change of the loss over all shares, in nats per token; lower "
            f"is better. Largest share: the largest share of streaming KV groups up to which the loss rises by at most "
            f"{settings['bound']:g} nats per token.",
            ["order", "area", "area minus that of random orders", "largest share"],
            body,
        )


def _answer_charts(context: RenderContext) -> Iterator[Chart]:
    run: Run = context.run
    for column, name in (("success", "right answers"), ("nll", "loss of the answers")):
        table = curves(answer_changes(run, column))
        groups: Any = table[table["model"].isin(list(context.models))].groupby(["model", "prompts"], sort=False)
        for (model, prompts), part in groups:
            yield Chart(
                plot_answer_curves(part, column, f"{model}, {prompts}: {name} by share"),
                f"Means over {part['n'].max()} prompts, bands: 95 % confidence intervals over prompts. An answer is "
                "right if greedy decoding gives exactly its tokens.",
                half_width=True,
            )


def _task_charts(context: RenderContext) -> Iterator[Chart]:
    table = curves(task_scores(context.run))
    groups: Any = table[table["model"].isin(list(context.models))].groupby(["model", "task"], sort=False)
    for (model, task), part in groups:
        yield Chart(
            plot_task_curves(part, f"{model}, {task}: score by share"),
            f"Means over {part['n'].max()} documents of the task, bands: 95 % confidence intervals over documents. "
            "The lm-evaluation-harness builds the prompts and scores the answers.",
            half_width=True,
        )


def _cache_charts(context: RenderContext) -> Iterator[Chart]:
    sizes = context.run.derived(cache_sizes)
    longest: dict[str, tuple[pd.DataFrame, pd.Series]] = {}
    for model, _, rows, settings in _summaries(context):
        longest[model] = (rows, settings)
    for model, (rows, settings) in longest.items():
        order = best_order(rows)["order"]
        yield Chart(
            plot_cache_sizes(
                sizes[(sizes["model"] == model) & (sizes["order"] == order)], f"{model}: size of the KV cache"
            ),
            "Keys and values of one sequence, computed from geometry and dtype, one line per share of streaming KV "
            f"groups, which keep {describe_window(settings)}.",
            half_width=True,
        )
