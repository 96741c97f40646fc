"""Charts, card and glossary of head influence, and the app page of one model."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from headscope.plots import learned_frequencies
from headscope.plots.style import escape_label
from headscope.rendering.blocks import (
    Card,
    Chart,
    ChartGroup,
    LazySequence,
    PageContent,
    RenderContext,
    Term,
    TextBlock,
)
from headscope.rendering.effect_cards import effects_card
from headscope.rendering.explorer_blocks import query_link
from headscope.results.effects.ranking import largest_unit
from headscope.results.effects.sweep import UNIT_KEYS, Effects
from headscope.results.effects.units import unit_nouns, unit_result
from headscope.results.result import Result
from headscope.results.words import count_nouns, sentence
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.column_metadata import capitalise, statistic, statistics
from headscope.runs.run import Run
from headscope.runs.summary import longest_ess_column
from probes.influence import PROBE, bands, plots
from probes.influence.analysis import (
    TEXT_NOUNS,
    BandKey,
    all_sweeps,
    band_sweeps,
    band_wavelengths,
    named_sets,
    ranked_sets,
    sweeps_without_bands,
    top_heads_by_statistic,
)
from probes.influence.declaration import AREAS
from probes.influence.results import (
    describe_change,
    describe_context_length,
    influence_results,
    sweep_details,
    unit_noun,
)

GLOSSARY = (
    Term(
        "Head influence",
        "Change of the next-token loss, in nats per token, when the learned position parameters of one head or KV "
        "group are reset, or when the head is ablated, and all others are unchanged. Above 0 the loss rises, so the "
        "model uses what was reset or ablated.",
        tables=("influence", "influence_answers"),
    ),
    Term(
        "Influence on an answer",
        "The same change for the loss of an answer: the tokens of a fact that is hidden in a long text and queried at "
        "its end. Heads that retrieve the fact have a large influence on it, even if their influence on the whole "
        "text is small.",
        tables=("influence_answers",),
    ),
)

_LOSS_LABELS = {"text": "loss", "answer": "loss of the answer"}
_RESET_DESCRIPTION = "the position parameters of one {noun} are reset"
_CHANGE_DESCRIPTIONS = {"joint": _RESET_DESCRIPTION, "freq": _RESET_DESCRIPTION, "scale": _RESET_DESCRIPTION}


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """What changing one unit costs, in the sweep of ablations, or else in the first sweep."""
    sweeps = [effects for effects in context.run.derived(sweeps_without_bands) if effects.model in context.models]
    if not sweeps:
        return
    effects = min(sweeps, key=lambda one: one.key["target"] != "none")
    largest = unit_result(
        effects,
        largest_unit(effects),
        f"{AREAS[effects.key['objective']]}.top",
        details=sweep_details(effects),
    )
    yield effects_card(
        effects,
        largest,
        "What does a head cost if it is changed?",
        capitalise(largest.details["change"]),
        "change of the loss (nats/token)",
        query_link(PROBE.path, model=effects.model),
    )


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """A group of charts for each sweep, and one for all bands of rotary pairs."""
    yield from (group for _, group in _chart_groups(context))


def page(context: RenderContext) -> PageContent:
    """Findings and charts of every sweep of the selected model."""
    run, label = context.run, context.selected_model
    swept_models = list(dict.fromkeys(effects.model for effects in run.derived(all_sweeps)))
    if label not in swept_models:
        available = f" It has sweeps of {', '.join(swept_models)}." if swept_models else ""
        advice = f"To measure one, run: {PROBE.example}"
        return PageContent(
            PROBE.title, "", {"": [TextBlock([f"This run has no influence sweep of {label}.{available}", advice])]}
        )
    charts = {group.heading: LazySequence(group.charts) for model, group in _chart_groups(context) if model == label}
    sentences = [sentence(result) for result in run.derived(_list_results) if result.model == label]
    sections = {**charts, "In words": [TextBlock(sentences, "Results of every sweep", collapsed=True)]}
    introduction = "Rise of the loss when one head or KV group is changed and all others are unchanged."
    return PageContent(f"{PROBE.title}: {label}", introduction, sections)


def _list_results(run: Run) -> list[Result]:
    return [*influence_results(run)]


def _chart_groups(context: RenderContext) -> Iterator[tuple[str, ChartGroup]]:
    """Groups of charts with the label of their model."""
    for effects in context.run.derived(sweeps_without_bands):
        key = effects.key
        change = describe_change(key["intervention"], key["target"], key["objective"])
        heading = f"{capitalise(change)}, {describe_context_length(key['context_length'], key['objective'])}"
        yield effects.model, ChartGroup(PROBE.title, heading, _sweep_charts(context, effects))
    for band_key, sweeps in context.run.derived(band_sweeps).items():
        label, length, objective = band_key
        loss = "" if objective == "text" else ": loss of the answer"
        heading = f"Rotary pairs by band{loss}, {describe_context_length(length, objective)}"
        yield label, ChartGroup(PROBE.title, heading, _band_charts(context.run, band_key, sweeps))


def _band_charts(run: Run, key: BandKey, sweeps: Sequence[Effects]) -> Iterator[Chart]:
    results = [result for result in run.derived(_list_results) if result.question == f"{AREAS[key[2]]}.band"]
    wavelengths = band_wavelengths(run, key[0], [effects.key["intervention"] for effects in sweeps])
    for kind, change in bands.KIND_DESCRIPTIONS.items():
        if of_kind := [effects for effects in sweeps if effects.key["intervention"].startswith(kind)]:
            conditions = {"context_length": key[1], "objective": key[2], "intervention": kind}
            largest = next(result for result in results if (result.model, result.where) == (key[0], conditions))
            caption = (
                f"{_count_texts(of_kind[0])} Rise of the loss with the {change} in one {largest.details['noun']}. One "
                "column per head or KV group, layer by layer. One row per band of rotary pairs, fastest pairs on top "
                "(short: wavelength below an eighth of the native context; long: above the native context)."
            )
            yield Chart(plots.plot_influence_by_band(of_kind, wavelengths), caption, sentence(largest))
    sets = ranked_sets(run, dict(zip(("model", "context_length", "objective"), key, strict=True)))
    if sets.empty:
        return
    yield Chart(
        plots.plot_joint_effects_by_band(sets, wavelengths),
        "Rise of the loss when a band of rotary pairs is ablated in all heads at once. With only the rotation removed, "
        "attention still depends on content but not on distance.",
    )


def _sweep_charts(context: RenderContext, effects: Effects) -> Iterator[Chart]:
    run, label, objective = context.run, effects.model, effects.key["objective"]
    noun, nouns, text_noun = unit_noun(effects.units), unit_nouns(effects.units), TEXT_NOUNS[objective]
    intervention = effects.key["intervention"]
    change = _CHANGE_DESCRIPTIONS.get(intervention, "one {noun} is changed").format(noun=noun)
    heads = context.heads[context.heads["model"] == label]
    yield Chart(
        plots.plot_forest(effects),
        f"{_count_texts(effects)} The {nouns} with the largest influence. Filled: exact; hollow: estimated. One small "
        f"dot per {text_noun}; bars are 95 % confidence intervals of exact effects over {text_noun}s (three or more).",
        _describe_largest_effect(run, effects),
    )
    if len(sets := named_sets(run, effects.key)):
        caption = (
            "All heads of a named set are changed together. Bars are 95 % confidence intervals over "
            f"{text_noun}s (three or more)."
        )
        yield Chart(plots.plot_named_sets(sets), caption, half_width=True)
    yield Chart(
        plots.plot_histogram(
            effects, {statistic(column).best_head_name: head for column, head in top_heads_by_statistic(heads).items()}
        ),
        f"Rise of the {_LOSS_LABELS[objective]} when {change} and all others are unchanged. A thin tail on the right "
        f"means that few {nouns} matter individually.",
        half_width=True,
    )
    yield Chart(plots.plot_matrix(effects), "Red: the loss rises; blue: it falls.", half_width=True)
    if intervention in ("freq", "joint") and "positions" in run.tables:
        top = largest_unit(effects)
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
                effects, log_ratio, "change", f"ln ratio of ESS₂, {escape_label(label)} over {escape_label(baseline)}"
            ),
            f"One point per {noun}: influence against the change of effective length.",
            half_width=True,
        )
    best_head_columns = [name for name, declared in statistics().items() if declared.best_head_name and name in heads]
    for column in best_head_columns:
        figure = plots.plot_against_statistic(effects, heads, column, statistic(column).label)
        yield Chart(figure, f"One point per {noun}.", half_width=True)
    if len(sets := ranked_sets(run, effects.key)):
        yield Chart(
            plots.plot_cumulative_effect(sets),
            f"The top {nouns} by influence are changed together, or as many random others of the same layers, if every "
            f"layer has so many. At the last point, all {nouns} are changed. A steep start means that few matter; a "
            "steady rise means that many act together.",
            half_width=True,
        )


def _count_texts(effects: Effects) -> str:
    """Text with the number of documents or trials."""
    return f"{count_nouns(effects.values.shape[1], TEXT_NOUNS[effects.key['objective']] + 's')}."


def _describe_largest_effect(run: Run, effects: Effects) -> str:
    """Sentences on the largest effect, and on how many effects differ from zero."""
    names = {f"{AREAS[effects.key['objective']]}.{name}" for name in ("top", "significant", "estimated")}
    return " ".join(
        sentence(result)
        for result in run.derived(_list_results)
        if result.question in names and (result.model, result.where) == (effects.model, effects.where)
    )


def _log_ratio(heads: pd.DataFrame, column: str, label: str, baseline: str) -> pd.DataFrame:
    """Layer, kv_group, head and `change`: ln of the ratio of a statistic under `label` to that under `baseline`."""
    values, baseline_values = (
        heads[heads["model"] == model].set_index([*UNIT_KEYS])[column].astype("float64") for model in (label, baseline)
    )
    return pd.DataFrame({"change": np.log(values / baseline_values)}).reset_index()
