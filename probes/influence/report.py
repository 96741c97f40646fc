"""Charts of head influence for the report, and the app page of one model."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from headscope.plots import learned_frequencies
from headscope.plots.style import escape_label
from headscope.plots.top_heads import plot_unit_bars
from headscope.report.blocks import (
    Card,
    Chart,
    ChartGroup,
    Finding,
    LazySequence,
    PageContent,
    RenderContext,
    TextBlock,
    insert_findings,
)
from headscope.report.explorer_blocks import query_link
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.column_metadata import capitalise, statistic, statistics
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column
from probes.influence import PROBE, band_plots, bands, plots
from probes.influence.analysis import (
    SweepKey,
    SweepUnits,
    all_sweeps,
    band_sweeps,
    band_wavelengths,
    document_effects,
    joint_effects,
    named_set_effects,
    ranked_set_effects,
    sweeps_without_bands,
    top_heads_by_statistic,
    unit_of_largest_rise,
)
from probes.influence.effect_rows import TEXT_NOUNS
from probes.influence.findings import sweep_findings
from probes.influence.labels import (
    describe_change,
    describe_context_length,
    describe_highest,
    describe_uncertainty,
    format_change,
    format_q_value,
    unit_label,
    unit_noun,
    unit_nouns,
)
from probes.influence.schema import SWEEP_KEYS, UNIT_COLUMNS

CARD_UNITS = 6
"""Units on the card of the overview."""
_LOSS_LABELS = {"text": "loss", "answer": "loss of the answer"}
_RESET_DESCRIPTION = "the position parameters of one {noun} are reset"
_CHANGE_DESCRIPTIONS = {"joint": _RESET_DESCRIPTION, "freq": _RESET_DESCRIPTION, "scale": _RESET_DESCRIPTION}


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """What changing one unit costs, in the sweep of ablations, or else in the first sweep."""
    sweeps = [sweep for sweep in context.run.derived(sweeps_without_bands) if sweep[0][0] in context.models]
    if not sweeps:
        return
    (label, length, component, target, objective), units = min(sweeps, key=lambda sweep: sweep[0][3] != "none")
    top = units.sort_values("delta", ascending=False)[:CARD_UNITS]
    change, worst = describe_change(component, target, objective), top.iloc[0]
    figure = plot_unit_bars(
        f"{capitalise(change)}: {label}",
        [unit_label(unit).replace("layer ", "L").replace(", ", " ") for _, unit in top.iterrows()],
        top["delta"].tolist(),
        top[UNIT_COLUMNS].to_numpy().tolist(),
        "%{x:+.3g} nats/token",
        label,
    )
    yield Card(
        figure.update_layout(margin_l=120).update_xaxes(title_text="change of the loss (nats/token)"),
        f"{capitalise(change)}, one {unit_noun(units)} at a time, {describe_context_length(length, objective)}: the "
        f"loss of {label} {describe_highest(worst, unit_label(worst))}.",
        half_width=True,
        question="What does a head cost if it is changed?",
        href=query_link(PROBE.path, model=label),
    )


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """A group of charts for each sweep, and one for all bands of rotary pairs."""
    yield from (group for _, group in _chart_groups(context))


def page(context: RenderContext) -> PageContent:
    """Findings and charts of every sweep of the selected model."""
    run, label = context.run, context.selected_model
    swept_models = list(dict.fromkeys(sweep[0][0] for sweep in run.derived(all_sweeps)))
    if label not in swept_models:
        available = f" It has sweeps of {', '.join(swept_models)}." if swept_models else ""
        advice = f"To measure one, run: {PROBE.example}"
        return PageContent(
            PROBE.title, "", {"": [TextBlock([f"This run has no influence sweep of {label}.{available}", advice])]}
        )
    charts = {group.heading: LazySequence(group.charts) for model, group in _chart_groups(context) if model == label}
    texts = [TextBlock([finding.text for finding in run.derived(_list_sweep_findings) if finding.model == label])]
    sections = insert_findings(charts, texts)
    introduction = "Rise of the loss when one head or KV group is changed and all others are unchanged."
    return PageContent(f"{PROBE.title}: {label}", introduction, sections)


def _list_sweep_findings(run: Run) -> list[Finding]:
    return [*sweep_findings(run)]


def _chart_groups(context: RenderContext) -> Iterator[tuple[str, ChartGroup]]:
    """Groups of charts with the label of their model."""
    for sweep in context.run.derived(sweeps_without_bands):
        label, length, component, target, objective = sweep[0]
        change = capitalise(describe_change(component, target, objective))
        heading = f"{change}, {describe_context_length(length, objective)}"
        yield label, ChartGroup(PROBE.title, heading, _sweep_charts(context, sweep))
    for (label, length, objective), units in context.run.derived(band_sweeps):
        loss = "" if objective == "text" else ": loss of the answer"
        heading = f"Rotary pairs by band{loss}, {describe_context_length(length, objective)}"
        effects = joint_effects(context.run, label, length, objective)
        wavelengths = band_wavelengths(context.run, label, units["component"])
        yield label, ChartGroup(PROBE.title, heading, _band_charts(units, effects, wavelengths))


def _band_charts(units: pd.DataFrame, effects: pd.DataFrame, wavelengths: Mapping[str, str]) -> Iterator[Chart]:
    for kind, change in bands.KIND_DESCRIPTIONS.items():
        if len(rows := units[units["component"].str.startswith(kind)]):
            largest = unit_of_largest_rise(rows)
            summary = (
                f"{_name_highest(largest)}: {bands.pairs_label(largest['component'])} of {unit_label(largest)}, "
                f"{format_change(largest['delta'])} nats/token."
            )
            caption = (
                f"{_count_texts(units)} Rise of the loss with the {change} in one {unit_noun(rows)}. One column per "
                "head or KV group, layer by layer. One row per band of rotary pairs, fastest pairs on top (short: "
                "wavelength below an eighth of the native context; long: above the native context)."
            )
            yield Chart(band_plots.plot_influence_by_band(rows, wavelengths), caption, summary)
    if effects.empty:
        return
    yield Chart(
        band_plots.plot_joint_effects_by_band(effects, wavelengths),
        "Rise of the loss when a band of rotary pairs is ablated in all heads at once. With only the rotation removed, "
        "attention still depends on content but not on distance.",
    )


def _sweep_charts(context: RenderContext, sweep: SweepUnits) -> Iterator[Chart]:
    run, (key, units) = context.run, sweep
    text_noun, noun, nouns = TEXT_NOUNS[key[-1]], unit_noun(units), unit_nouns(units)
    label, _, component, _, objective = key
    change = _CHANGE_DESCRIPTIONS.get(component, "one {noun} is changed").format(noun=noun)
    heads = context.heads[context.heads["model"] == label]
    yield Chart(
        plots.plot_forest(units, _rows_of_sweep(run.derived(document_effects), key)),
        f"{_count_texts(units)} The {nouns} with the largest influence. Filled: exact; hollow: estimated. One small "
        f"dot per {text_noun}; bars are 95 % confidence intervals of exact effects over {text_noun}s (three or more).",
        _describe_largest_effect(units),
    )
    if len(sets := _rows_of_sweep(run.derived(named_set_effects), key)):
        caption = (
            "All heads of a named set are changed together. Bars are 95 % confidence intervals over "
            f"{text_noun}s (three or more)."
        )
        yield Chart(plots.plot_named_sets(sets), caption, half_width=True)
    yield Chart(
        plots.plot_histogram(
            units, {statistic(column).best_head_name: head for column, head in top_heads_by_statistic(heads).items()}
        ),
        f"Rise of the {_LOSS_LABELS[objective]} when {change} and all others are unchanged. A thin tail on the right "
        f"means that few {nouns} matter individually.",
        half_width=True,
    )
    yield Chart(plots.plot_matrix(units), "Red: the loss rises; blue: it falls.", half_width=True)
    if component in ("freq", "joint") and "positions" in run.tables:
        top = units.sort_values("delta").iloc[-1]
        yield Chart(
            learned_frequencies.plot_learned_frequencies(
                rows_at_longest_length(run.positions), label, int(top["layer"]), int(top["kv_group"])
            ),
            f"Frequencies of the {noun} with the largest influence: after training, at its start, and of the "
            "checkpoint.",
            half_width=True,
        )
    ess2, baseline = longest_ess_column(context.heads), run.models[0]
    if ess2 is not None and label != baseline:
        log_ratio = _log_ratio(context.heads, ess2, label, baseline)
        yield Chart(
            plots.plot_against_statistic(
                units, log_ratio, "change", f"ln ratio of ESS₂, {escape_label(label)} over {escape_label(baseline)}"
            ),
            f"One point per {noun}: influence against the change of effective length.",
            half_width=True,
        )
    best_head_columns = [name for name, declared in statistics().items() if declared.best_head_name and name in heads]
    for column in best_head_columns:
        figure = plots.plot_against_statistic(units, heads, column, statistic(column).label)
        yield Chart(figure, f"One point per {noun}.", half_width=True)
    if len(effects := _rows_of_sweep(run.derived(ranked_set_effects), key)):
        yield Chart(
            plots.plot_cumulative_effect(effects),
            f"The top {nouns} by influence are changed together, or as many random ones of the same layers. At the "
            f"last point, all {nouns} are changed. A steep start means that few matter; a steady rise means that many "
            "act together.",
            half_width=True,
        )


def _rows_of_sweep(rows: pd.DataFrame, key: SweepKey) -> pd.DataFrame:
    is_in_sweep = np.logical_and.reduce([rows[name] == value for name, value in zip(SWEEP_KEYS, key, strict=True)])
    return rows[is_in_sweep]


def _count_texts(units: pd.DataFrame) -> str:
    """Text with the number of documents or trials."""
    count, objective = units[["documents", "objective"]].iloc[0]
    return f"{count} {TEXT_NOUNS[objective]}{'s' if count > 1 else ''}."


def _name_highest(unit: pd.Series) -> str:
    """What the highest change of a sweep is: a rise of the loss, or a fall if it falls for all units."""
    return "Largest rise" if unit["delta"] >= 0 else "Smallest fall"


def _describe_largest_effect(units: pd.DataFrame) -> str:
    """Text with the highest effect, and how many effects differ from zero."""
    largest = unit_of_largest_rise(units)
    text = (
        f"{_name_highest(largest)}: {unit_label(largest)}, {format_change(largest['delta'])} nats/token"
        f"{describe_uncertainty(largest)}{format_q_value(largest)}."
    )
    if "exact" not in set(units["method"]):
        return f"{text} Estimates do not decide whether an effect is real."
    if units["p_adjusted"].isna().all():
        return f"{text} Too few {TEXT_NOUNS[largest['objective']]}s to call any effect real."
    significant = int((units["p_adjusted"] < 0.05).sum())
    return f"{text} {significant} of {len(units)} effects differ from zero (false discovery rate 5 %)."


def _log_ratio(heads: pd.DataFrame, column: str, label: str, baseline: str) -> pd.DataFrame:
    """Layer, kv_group, head and `change`: ln of the ratio of a statistic under `label` to that under `baseline`."""
    values, baseline_values = (
        heads[heads["model"] == model].set_index(UNIT_COLUMNS)[column].astype("float64") for model in (label, baseline)
    )
    return pd.DataFrame({"change": np.log(values / baseline_values)}).reset_index()
