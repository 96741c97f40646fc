"""Charts, findings and glossary of the ablation probe."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from headscope.plots.heads import plot_matrix
from headscope.prompts.answers import count_pairs, describe_unanswered
from headscope.prompts.pairs import METRIC_LABELS, METRIC_UNITS
from headscope.report.blocks import Chart, ChartGroup, Finding, FindingData, RenderContext, Term
from headscope.report.text import describe_extremes, head_mask
from headscope.runs.run import Run
from probes.ablation import PROBE
from probes.ablation.analysis import STATISTICS, SweepKey, prompt_metrics, sweeps, with_change
from probes.ablation.schema import ABLATION, ABLATION_SETS

GLOSSARY = (
    Term(
        "Zero, mean and resample ablation",
        "A head's output z before o_proj is replaced: by 0, by its mean over the positions of a reference text, or by "
        "its value at the same positions of other prompts of the set (averaged over several). The change of the "
        "answer's metric is the head's total effect, through all later layers.",
        tables=(ABLATION.name,),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The change of the metric for every head, by kind of ablation."""
    yield ChartGroup(PROBE.title, "Change of the answer's metric when one head is ablated", _matrix_charts(context))


def findings(run: Run) -> Iterator[Finding]:
    """The heads whose ablation lowers and raises the metric most, and the named heads together."""
    if ABLATION.name not in run.tables:
        return
    metrics = run.derived(prompt_metrics)
    for (model, prompts, metric), values in metrics.items():
        if note := describe_unanswered(metric, values):
            yield Finding(PROBE.title, f"{model}, {prompts}: {note}", model)
    for key, heads in run.derived(sweeps):
        order = heads.sort_values("change", kind="stable")
        low, high, count = order.iloc[0], order.iloc[-1], int(heads["prompt_count"].max())
        lower = "falls most" if low["change"] < 0 else "rises least"
        higher = "rises most" if high["change"] > 0 else "falls least"
        text = (
            f"{_describe_sweep(key)} ({count_pairs(key[2], metrics[key[:3]], 'prompt')}; {len(heads)} heads, one at a "
            f"time): the {METRIC_LABELS[key[2]]} {lower} when {low['name']} is ablated, "
            f"{_format_change(low, key)}, and {higher} when {high['name']} is ablated, {_format_change(high, key)}."
        )
        data = FindingData(low["change"], low["low"], low["high"], count, int(low["layer"]), int(low["head"]))
        yield Finding(PROBE.title, text, key[0], data=data)
    if ABLATION_SETS.name in run.tables:
        groups: Any = with_change(run.table(ABLATION_SETS.name)).groupby(
            ["model", "prompts", "metric", "kind"], sort=False
        )
        for key, rows in groups:
            yield Finding(
                PROBE.title,
                f"{_describe_sweep(key)}: with all {rows['size'].iloc[0]} named heads ablated together, the "
                f"{METRIC_LABELS[key[2]]} changes by {rows['change'].mean():+.3g} {METRIC_UNITS[key[2]]}, from "
                f"{rows['metric_before'].mean():.2f} to {rows['metric_after'].mean():.2f}.",
                key[0],
            )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The change for one head in every sweep of a model."""
    if ABLATION.name not in run.tables:
        return
    for key, heads in run.derived(sweeps):
        rows = heads[head_mask(heads, layer, head)]
        if key[0] == model and len(rows):
            change = _format_change(rows.iloc[0], key)
            yield f"{_describe_sweep(key)}: the {METRIC_LABELS[key[2]]} changes by {change}."


def _matrix_charts(context: RenderContext) -> Iterator[Chart]:
    for column in STATISTICS:
        for label in list(context.finite_values(column))[:1]:
            yield Chart(
                plot_matrix(context.heads, column, label, context.scale_heads),
                "One cell per head; layer 0 is at the bottom. Mean over prompts. Blue: the metric falls without the "
                "head.",
                describe_extremes(context.heads, column, label),
                half_width=True,
            )


def _describe_sweep(key: SweepKey) -> str:
    noun = "Streaming attention" if key[3] == "streaming" else f"{key[3].capitalize()} ablation"
    return f"{noun} in {key[0]}, {key[1]}"


def _format_change(row: pd.Series, key: SweepKey) -> str:
    """The change with its unit and interval."""
    bounds = "" if np.isnan(row["low"]) else f" (95 % confidence interval {row['low']:+.3g} to {row['high']:+.3g})"
    return f"{row['change']:+.3g} {METRIC_UNITS[key[2]]}{bounds}"
