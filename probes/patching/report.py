"""Charts of the patching probe for report and app, charts of one head, and its terminal overview."""

from collections.abc import Iterator

import pandas as pd

from headscope.estimates import ESTIMATE_MARK
from headscope.plots.heads import plot_small_matrices
from headscope.report.blocks import Chart, ChartGroup, Overview, RenderContext
from headscope.runs.aggregation import plain_types
from headscope.runs.column_metadata import capitalise
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.patching import PROBE, plots
from probes.patching.analysis import (
    STATISTICS,
    SWEEP_KEYS,
    SweepKey,
    agreement_of,
    effects_by_span,
    estimate_agreement,
    largest_unit,
    pair_metrics,
    position_effects,
    questions_about_pairs,
    sweeps,
    unit_effects,
)
from probes.patching.findings import unit_of_head
from probes.patching.labels import describe_sweep, format_effect, unit_label
from probes.patching.schema import ACTIVATION_LABELS, PATCHING, PATCHING_TOKENS

MATRIX_CAPTION = (
    "Mean over pairs of the share of the metric's difference that one head's patch moves. Red: towards the run that "
    f"the activation comes from; blue: away from it. {ESTIMATE_MARK}: estimated."
)
POSITION_CAPTION = (
    "Effect of patching one position at a time, for the heads of largest effect. Tokens are those of the clean prompt, "
    "with the token of the corrupted prompt after | where it differs."
)
SPAN_CAPTION = (
    "Effect of patching the positions of one named span, mean over pairs, for the heads of largest effect. "
    f"{ESTIMATE_MARK}: estimated."
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """A group of charts for each sweep of the selected model, and the models beside each other."""
    if PATCHING.name not in context.run.tables:
        return
    for key, units in context.run.derived(sweeps):
        if key[0] == context.selected_model:
            heading = f"{describe_sweep(key)}, {key[1]}"
            yield ChartGroup(PROBE.title, heading, _sweep_charts(context.run, key, units))
    yield ChartGroup(PROBE.title, "Patching effects of every model", _model_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """The effect of one head, or of its KV group, on every prompt set."""
    if PATCHING.name not in run.tables:
        return
    effects = unit_of_head(run, run.derived(unit_effects), layer, head)
    models = default_models_with(run, model)
    effects = effects[effects["model"].isin(models)]
    if len(effects):
        yield Chart(
            plots.plot_head(effects, models, layer, head),
            "Share of the metric's difference between the two prompts that patching this head moves, mean over pairs. "
            "Error bars: 95 % confidence interval over pairs, from three pairs on. Pale bars are estimates.",
            half_width=True,
        )


def overview(run: Run) -> Overview | None:
    """One row per sweep: pairs, the metric of both prompts, and the unit of largest effect."""
    if PATCHING.name not in run.tables:
        return None
    records = []
    for key, units in run.derived(sweeps):
        largest = largest_unit(units)
        pairs = run.derived(pair_metrics)
        pairs = pairs[(pairs["model"] == key[0]) & (pairs["prompts"] == key[1])]
        records.append(
            {
                "model": key[0],
                "prompts": key[1],
                "activation": f"{key[3]}, {key[4]}",
                "pairs": int(units["pairs"].max()),
                "clean": f"{pairs['metric_clean'].mean():.2f}",
                "corrupted": f"{pairs['metric_corrupted'].mean():.2f}",
                "most positive effect": f"{unit_label(largest)}, {format_effect(largest)}",
            }
        )
    warnings = [question for _, question in run.derived(questions_about_pairs)]
    if not records:
        warnings.append(
            "no pair differs enough in its metric between the two prompts in every model, so there are no effects. Use "
            "other pairs, or fewer models"
        )
    return Overview("patching", PROBE.title, pd.DataFrame(records), records, warnings)


def _sweep_charts(run: Run, key: SweepKey, units: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(plots.plot_matrix(key, units), MATRIX_CAPTION, plots.describe_largest(units), half_width=True)
    agreement = run.derived(estimate_agreement)
    for name, value in zip(SWEEP_KEYS, key, strict=True):
        agreement = agreement[agreement[name] == value]
    if len(agreement):
        spearman, shared, size = agreement_of(agreement.reset_index(drop=True))
        yield Chart(
            plots.plot_agreement(key, agreement),
            "One point per head or KV group that was both estimated and patched. On the dashed line the estimate "
            "equals the exact effect.",
            f"Rank correlation {spearman:.2f}; the top {size} by estimated and by exact absolute effect share "
            f"{shared}.",
            half_width=True,
        )
    if len(spans := effects_by_span(run, key)):
        yield Chart(plots.plot_spans(key, spans), SPAN_CAPTION, half_width=True)
    if PATCHING_TOKENS.name not in run.tables:
        return
    tokens = plain_types(run.table(PATCHING_TOKENS.name))
    tokens = tokens[(tokens["model"] == key[0]) & (tokens["prompts"] == key[1])]
    for pair in tokens["pair"].unique()[:1]:
        rows = position_effects(run, key, pair)
        if len(rows):
            yield Chart(plots.plot_positions(key, pair, rows, tokens[tokens["pair"] == pair]), POSITION_CAPTION)


def _model_charts(context: RenderContext) -> Iterator[Chart]:
    """The columns of the per-head table as one matrix per model."""
    for activation, label in ACTIVATION_LABELS.items():
        column = f"patching_{activation}"
        if len(context.finite_values(column)) > 1:
            yield Chart(
                plot_small_matrices(context.heads, column, context.scale_heads),
                f"One cell per head; layer 0 is at the bottom. {capitalise(STATISTICS[column].meaning)}. Compare how "
                f"the effects of the {label} change between models. {ESTIMATE_MARK}: not exact in every prompt set.",
            )
