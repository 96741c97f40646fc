"""What report and app show of head influence: a group of charts for each sweep, and a page about one model."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from headscope.plots import learned_frequencies
from headscope.plots.style import escape_label
from headscope.report.blocks import (
    Block,
    Chart,
    ChartGroup,
    Finding,
    LazySequence,
    PageContent,
    RenderContext,
    TextBlock,
)
from headscope.runs.column_metadata import capitalise, statistic, statistics
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column
from probes.influence import PROBE, band_figures, bands, plots
from probes.influence.analysis import (
    SweepKey,
    SweepUnits,
    all_sweeps,
    band_sweeps,
    band_wavelengths,
    describe_change,
    describe_context_length,
    describe_uncertainty,
    document_effects,
    format_q_value,
    joint_effects,
    most_harmful_unit,
    named_set_effects,
    ranked_set_effects,
    sweeps_without_bands,
    top_heads_by_statistic,
    unit_label,
)
from probes.influence.findings import sweep_findings
from probes.influence.objectives import TEXT_NOUNS
from probes.influence.tables import SWEEP_KEYS, UNIT_COLUMNS

_LOSS_LABELS = {"text": "Loss", "answer": "Loss of the answer"}
_RESET_DESCRIPTION = "the position parameters of one unit are reset"
_CHANGE_DESCRIPTIONS = {"joint": _RESET_DESCRIPTION, "freq": _RESET_DESCRIPTION, "scale": _RESET_DESCRIPTION}


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """A group for each sweep: what was reset to what, and in which context length; and one for all bands of pairs."""
    yield from (group for _, group in _chart_groups(context))


def page(context: RenderContext) -> PageContent:
    """Of one model: histogram, matrix, learned spectrum and cumulative curve of each component."""
    run, label = context.run, context.selected_model
    swept = list(dict.fromkeys(sweep[0][0] for sweep in run.derived(all_sweeps)))
    if label not in swept:
        others = f" It holds those of {', '.join(swept)}." if swept else ""
        how = f"Make one: {PROBE.example}."
        return PageContent(PROBE.title, "", {"": [TextBlock([f"This view has no sweep of {label}.{others}", how])]})
    sections: dict[str, Sequence[Block]]
    sections = {"": [TextBlock([said.text for said in run.derived(_list_sweep_findings) if said.model == label])]}
    sections |= {group.heading: LazySequence(group.charts) for other, group in _chart_groups(context) if other == label}
    lead = "Loss added when one unit is changed, a head or a key group, and all others are kept."
    return PageContent(f"{PROBE.title}: {label}", lead, sections)


def _list_sweep_findings(run: Run) -> list[Finding]:
    return [*sweep_findings(run)]


def _chart_groups(context: RenderContext) -> Iterator[tuple[str, ChartGroup]]:
    """The groups, each with the label of its model."""
    for sweep in context.run.derived(sweeps_without_bands):
        label, length, *what = sweep[0]
        heading = f"{capitalise(describe_change(*what))}, {describe_context_length(length, what[-1])}"
        yield label, ChartGroup(PROBE.title, heading, _sweep_charts(context, sweep))
    for (label, length, objective), units in context.run.derived(band_sweeps):
        loss = "" if objective == "text" else ": loss of the answer"
        heading = f"Rotary pairs by band{loss}, {describe_context_length(length, objective)}"
        effects = joint_effects(context.run, label, length, objective)
        waves = band_wavelengths(context.run, label, units["component"])
        yield label, ChartGroup(PROBE.title, heading, _band_charts(units, effects, waves))


def _band_charts(units: pd.DataFrame, effects: pd.DataFrame, wavelengths: Mapping[str, str]) -> Iterator[Chart]:
    told = (
        f"{_count_texts(units)} A column is a head, or a key group, layer by layer; a row is a band of its rotary "
        "pairs with "
        "their wavelengths (short: below an eighth of the native context, long: above it), "
    )
    for kind, done in bands.KIND_DESCRIPTIONS.items():
        if len(mine := units[units["component"].str.startswith(kind)]):
            first = most_harmful_unit(mine)
            most = (
                f"Most: pairs {bands.band_label(first['component'])} of {unit_label(first)}, "
                f"{first['delta']:+.2g} nats/token."
            )
            caption = f"{told}the fastest on top: the loss added with {done}, of this unit alone."
            yield Chart(band_figures.plot_influence_by_band(mine, wavelengths), caption, most)
    if effects.empty:
        return
    yield Chart(
        band_figures.plot_joint_effects_by_band(effects, wavelengths),
        "What the model loses when every head at once loses a band: its part of the logits, or only its rotation, so "
        "that the heads still see what a token is but not how far.",
    )


def _sweep_charts(context: RenderContext, sweep: SweepUnits) -> Iterator[Chart]:
    run, (key, units) = context.run, sweep
    noun = TEXT_NOUNS[key[-1]]
    label, _, component, _, objective = key
    heads = context.heads[context.heads["model"] == label]
    yield Chart(
        plots.plot_forest(units, _rows_of_sweep(run.derived(document_effects), key)),
        f"{_count_texts(units)} The units of largest influence: filled where evaluated, hollow where estimated; a "
        "small "
        f"dot is one {noun}, the bar a 95 % interval over {noun}s, where there are three or more.",
        _describe_largest_effect(units),
    )
    if len(sets := _rows_of_sweep(run.derived(named_set_effects), key)):
        how = "The heads of each named set changed together; the bar a 95 % interval, where there are three or more."
        yield Chart(plots.plot_named_sets(sets), how, half_width=True)
    yield Chart(
        plots.plot_histogram(
            units, {statistic(column).best_head_name: head for column, head in top_heads_by_statistic(heads).items()}
        ),
        f"{_LOSS_LABELS[objective]} added when {_CHANGE_DESCRIPTIONS.get(component, 'this is done to one unit')}, "
        "all others kept. Most "
        "units near zero and a thin tail on the right mean that few units carry the gain one by one.",
        half_width=True,
    )
    yield Chart(plots.plot_matrix(units), "Red units are missed, blue ones were better left out.", half_width=True)
    if component in ("freq", "joint") and "positions" in run.tables:
        top = units.sort_values("delta").iloc[-1]
        yield Chart(
            learned_frequencies.plot_learned_frequencies(run.positions, label, int(top["layer"]), int(top["kv_group"])),
            "The unit of largest influence: its frequencies as learned, at the start and in base.",
            half_width=True,
        )
    ess2, first = longest_ess_column(context.heads), run.models[0]
    if ess2 is not None and label != first:
        change = _log_ratio(context.heads, ess2, label, first)
        yield Chart(
            plots.plot_against_statistic(
                units, change, "change", f"ln ratio of ESS₂, {escape_label(label)} over {escape_label(first)}"
            ),
            "Do the units that matter also change how many tokens they attend to?",
            half_width=True,
        )
    for column in (called for called, declared in statistics().items() if declared.best_head_name and called in heads):
        drawn = plots.plot_against_statistic(units, heads, column, statistic(column).label)
        yield Chart(drawn, "A dot is a unit.", half_width=True)
    if len(effects := _rows_of_sweep(run.derived(ranked_set_effects), key)):
        yield Chart(
            plots.plot_cumulative_effect(effects),
            "Units changed together, the most influential first, against as many random ones of the same layers; the "
            "last point changes all. A steep start means few units, a steady rise that many units act together.",
            half_width=True,
        )


def _rows_of_sweep(rows: pd.DataFrame, key: SweepKey) -> pd.DataFrame:
    """The rows of one sweep."""
    same = np.logical_and.reduce([rows[name] == value for name, value in zip(SWEEP_KEYS, key, strict=True)])
    return rows[same]


def _count_texts(units: pd.DataFrame) -> str:
    first = units.iloc[0]
    return f"{first['documents']} {TEXT_NOUNS[first['objective']]}{'s' if first['documents'] > 1 else ''}."


def _describe_largest_effect(units: pd.DataFrame) -> str:
    """The unit that matters most, and how many differ from zero beyond noise."""
    first = most_harmful_unit(units)
    told = (
        f"Most: {unit_label(first)}, {first['delta']:+.2g} nats/token"
        f"{describe_uncertainty(first)}{format_q_value(first)}."
    )
    if units["p_adjusted"].isna().all():
        return f"{told} So few {TEXT_NOUNS[first['objective']]}s cannot tell any unit from zero."
    clear = int((units["p_adjusted"] < 0.05).sum())
    return f"{told} {clear} of {len(units)} units differ from zero (false discovery rate 5 %)."


def _log_ratio(heads: pd.DataFrame, column: str, label: str, baseline: str) -> pd.DataFrame:
    """Layer, kv_group, head and `change`, ln of the statistic under `label` over that under `first`."""
    own, base = (
        heads[heads["model"] == model].set_index(UNIT_COLUMNS)[column].astype("float64") for model in (label, baseline)
    )
    return pd.DataFrame({"change": np.log(own / base)}).reset_index()
