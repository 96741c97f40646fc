"""Findings, charts and glossary of direct logit attribution."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import pandas as pd

from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, Finding, FindingData, RenderContext, Term
from headscope.report.statistic_charts import comparison_chart
from headscope.report.text import (
    describe_extremes,
    describe_ranks,
    format_head_count,
    head_mask,
    head_name,
    heads_by_model,
)
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models, default_models_with
from probes.attribution import PROBE, plots
from probes.attribution.schema import STATISTIC_NAME, mean_over_positions

GLOSSARY = (
    Term(
        "Direct logit attribution (DLA)",
        "The logit of a token is a sum: the embedding, every head and every MLP add a term. The direct logit "
        "attribution of a head is the term of its own output; effects through later layers are not counted. The mean "
        "over the vocabulary is subtracted, because a constant makes no token more likely. Norms are frozen at their "
        "observed scale.",
        "(z_h W_h) · g ∘ (U_y − mean U) / scale of the final norm",
        ("attribution",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """The terms of each model's logit, and the heads with the largest and smallest contribution."""
    for label in default_models(run) if "attribution_parts" in run.tables else ():
        means = _mean_parts(run, label)
        if means.empty:
            continue
        yield Finding(
            PROBE.title,
            f"In {label}, the logit of the next token is {means['logit']:.2f} above the mean logit of the vocabulary. "
            f"Direct terms: {means['heads']:+.2f} from heads, {means['other']:+.2f} from MLPs and other layer terms, "
            f"{means['embedding']:+.2f} from the embedding and {means['bias']:+.2f} from biases.",
            label,
            data=FindingData(float(means["logit"]), n=_document_count(run, "attribution_parts", label)),
        )
        for _, block in heads_by_model(run.heads[run.heads["model"] == label], STATISTIC_NAME):
            ordered = block.sort_values(STATISTIC_NAME)
            low, high = ordered.iloc[0], ordered.iloc[-1]
            yield Finding(
                PROBE.title,
                f"In {label}, {format_head_count(block[STATISTIC_NAME] > 0)} raise the logit of the next token; "
                f"{head_name(high)} raises it most ({_format_contribution(high)}), and {head_name(low)} "
                f"{'lowers it most' if low[STATISTIC_NAME] < 0 else 'raises it least'} ({_format_contribution(low)}).",
                label,
                data=FindingData.of_head(high, STATISTIC_NAME, _document_count(run, "attribution", label)),
            )


def _document_count(run: Run, table: str, label: str) -> int:
    rows = run.table(table)
    return int(rows[rows["model"] == label]["doc"].nunique())


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The head's rank by direct logit attribution."""
    if ranks := describe_ranks(run, STATISTIC_NAME, layer, head):
        yield f"Rank by {statistic(STATISTIC_NAME).label}: {ranks}."


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """What every head adds to the next token's logit, and all terms of that logit."""
    yield ChartGroup(PROBE.title, "Contribution of each head to the next token's logit", _head_charts(context))
    yield ChartGroup(PROBE.title, "Terms of the logit by layer", _part_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """The contribution of one head by position."""
    if "attribution" in run.tables:
        yield from _position_chart(run, tuple(default_models_with(run, model)), layer, head)


@lru_cache(8)
def _position_chart(run: Run, models: Sequence[str], layer: int, head: int) -> Sequence[Chart]:
    """The chart of a head by position, if the head has rows; cached: it does not depend on the selected model."""
    rows = run.table("attribution")
    rows = rows[head_mask(rows, layer, head)]
    if rows.empty:
        return []
    chart = Chart(
        plots.plot_by_position(rows, [*models], layer, head),
        "Direct contribution, without effects through later layers: above zero the head makes the next token more "
        "likely. The band is the 95 % confidence interval over documents, shown for three or more.",
        half_width=True,
    )
    return [chart]


def _head_charts(context: RenderContext) -> Iterator[Chart]:
    labels = list(context.finite_values(STATISTIC_NAME))
    for label in labels[:1]:
        yield Chart(
            head_figures.plot_matrix(context.heads, STATISTIC_NAME, label, context.scale_heads),
            "One cell per head; layer 0 is at the bottom. Direct contribution to the logit of the next token, minus "
            "the mean over the vocabulary.",
            describe_extremes(context.heads, STATISTIC_NAME, label),
        )
    if len(labels) > 1:
        yield comparison_chart(context.heads, STATISTIC_NAME, labels[0])


def _part_charts(context: RenderContext) -> Iterator[Chart]:
    parts = context.table("attribution_parts")
    if parts is None:
        return
    for label in context.models:
        if (parts["model"] == label).any():
            yield Chart(
                plots.plot_by_layer(parts, label),
                "Mean over positions and documents. The bars, the embedding and the biases add up to the logit, minus "
                "its mean over the vocabulary.",
                half_width=True,
            )


def _mean_parts(run: Run, model: str) -> pd.Series:
    """Mean over positions and documents of each term, summed over layers."""
    rows = plain_types(run.table("attribution_parts"))
    rows = rows[rows["model"] == model]
    by_layer = (
        mean_over_positions(rows_at_longest_length(rows), "part", "layer") if len(rows) else pd.Series(dtype="float64")
    )
    return by_layer.groupby(level="part").sum() if len(rows) else by_layer


def _format_contribution(row: pd.Series) -> str:
    low, high = row[f"{STATISTIC_NAME}_low"], row[f"{STATISTIC_NAME}_high"]
    bounds = "" if pd.isna(low) else f", 95 % confidence interval {low:+.3f} to {high:+.3f}"
    return f"{row[STATISTIC_NAME]:+.3f} logits{bounds}"
