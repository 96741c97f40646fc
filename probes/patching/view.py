"""Charts of the patching probe for report and app, charts of one head, and its glossary."""

from collections.abc import Callable, Iterator, Sequence

import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import ESTIMATE_MARK
from headscope.plots.head_matrices import plot_small_matrices
from headscope.plots.selector import describe_choices
from headscope.rendering.blocks import Card, Chart, ChartGroup, RenderContext, Term
from headscope.rendering.effect_cards import effects_card
from headscope.rendering.explorer_blocks import query_link
from headscope.rendering.text import head_mask
from headscope.results.effects.comparison import agreements
from headscope.results.effects.ranking import largest_unit
from headscope.results.effects.results import effect_text
from headscope.results.effects.sweep import Effects
from headscope.results.effects.units import unit_result, units_of_head
from headscope.results.words import sentence
from headscope.runs.column_metadata import capitalise
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.patching import PROBE, plots
from probes.patching.analysis import (
    STATISTICS,
    describe_sweep,
    layer_sweeps,
    pair_sweeps,
    parts_of_sweep,
    patch_tables,
    span_sweeps,
    sweeps,
)
from probes.patching.declaration import ACTIVATION_LABELS, PATCHING, PATCHING_ENTRIES, PATCHING_LAYERS
from probes.patching.plots import MAX_ENTRY_HEADS, pairs_in_menu, plot_entries, plot_layers, plot_positions
from probes.patching.position_maps import PositionMap, entry_maps, layer_maps, unit_maps
from probes.patching.results import EFFECT, layer_sweep_results, map_result, sweep_details, unit_results

GLOSSARY = (
    Term(
        "Activation patching",
        "Run one prompt of a pair with one activation of one head taken from the run of the other prompt. Denoising "
        "puts a clean activation into the corrupted run: it asks whether the head is sufficient to restore the answer. "
        "Noising puts a corrupted activation into the clean run: it asks whether the head is necessary. An effect of 0 "
        "changes nothing; an effect of 1 moves the metric to its value in the other run.",
        "(m(patched) - m(unpatched)) / (m(source) - m(unpatched)); source: the run that the activation comes from",
        (PATCHING.name,),
    ),
    Term(
        "Patching of layers",
        "Patching of the residual stream before a decoder layer (resid_pre), or of what its attention (attn_out) or "
        "its MLP (mlp_out) adds to it, at one position, a named span or all positions. It shows where in the model and "
        "at which token the information is.",
        tables=(PATCHING_LAYERS.name,),
    ),
    Term(
        "Attribution patching",
        "An estimate of all patches from one backward pass: the gradient of the metric with respect to the head's "
        "output, times the change of that output. Attention weights are recomputed with the patched queries or keys "
        "(AtP*). Estimates select the heads to patch exactly; they decide nothing.",
        "Σᵢ ⟨∂m/∂zᵢ, z′ᵢ − zᵢ⟩",
        (PATCHING.name,),
    ),
)
MATRIX_CAPTION = (
    "Mean over pairs of the share of the metric's difference that one head's patch moves. Red: towards the run that "
    f"the activation comes from; blue: away from it. {ESTIMATE_MARK}: estimated."
)
POSITION_CAPTION = (
    "Effect of patching one position at a time, for the heads of largest effect in any pair. Tokens are those of the "
    "clean prompt, with the token of the corrupted prompt after | where it differs."
)
PAIR_CAPTION = (
    "Effect in one prompt pair, or mean over the pairs of one group, for the heads of largest effect in any of them. "
    f"{ESTIMATE_MARK}: estimated."
)
SPAN_CAPTION = (
    "Effect of patching the positions of one named span, mean over pairs, for the heads of largest effect. "
    f"{ESTIMATE_MARK}: estimated."
)
LAYER_POSITION_CAPTION = (
    "Effect of patching one layer at one position. Tokens are those of the clean prompt, with the token of the "
    "corrupted prompt after | where it differs."
)
ENTRY_CAPTION = (
    "Effect of patching one entry of a head's attention pattern. An entry is the weight of one query token "
    "(destination) on one key token (source); its row is not normalised again. At most "
    f"{MAX_ENTRY_HEADS} heads, of largest effect in any pair. Tokens are those of the clean prompt, with the token of "
    "the corrupted prompt after | where it differs."
)
LAYER_CAPTION = (
    "Mean over pairs of the share of the metric's difference that the patch of one layer moves. Error bars: confidence "
    "interval over pairs, from three pairs on. Pale bars are estimates."
)

MAX_CARDS = 3
"""Sweeps with a card on the overview."""


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """The units of largest effect in the first sweeps of the selected model."""
    if PATCHING.name not in context.run.tables:
        return
    selected = [effects for effects in context.run.derived(sweeps) if effects.model == context.selected_model]
    for effects in selected[:MAX_CARDS]:
        largest = unit_result(effects, largest_unit(effects), "patching.top", details=sweep_details(effects))
        yield effects_card(
            effects,
            largest,
            f"Which heads carry the answer ({effects.key['prompts']})?",
            describe_sweep(effects),
            "share of the metric's difference",
            query_link(PROBE.path, model=effects.model),
        )


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """A group of charts for each sweep of the selected model, and the models beside each other."""
    if not patch_tables(context.run):
        return
    for effects in context.run.derived(sweeps):
        if effects.model == context.selected_model:
            heading = f"{describe_sweep(effects)}, {effects.key['prompts']}"
            yield ChartGroup(PROBE.title, heading, _sweep_charts(context.run, effects))
    if PATCHING_LAYERS.name in context.run.tables:
        yield ChartGroup(PROBE.title, "Patching of layers", _layer_charts(context))
    if PATCHING_ENTRIES.name in context.run.tables:
        yield ChartGroup(PROBE.title, "Patching of entries of the attention pattern", _entry_charts(context))
    yield ChartGroup(PROBE.title, "Patching effects of every model", _model_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """The effect of one head, or of its KV group, on every prompt set."""
    groups = run.heads.loc[head_mask(run.heads, layer, head), "kv_group"]
    if PATCHING.name not in run.tables or groups.empty:
        return
    models = default_models_with(run, model)
    rows = run.derived(_head_rows, layer, head, int(groups.iloc[0]))
    rows = rows[rows["model"].isin(models)] if len(rows) else rows
    if len(rows):
        yield Chart(
            plots.plot_head(rows, models, layer, head),
            "Share of the metric's difference between the two prompts that patching this head moves, mean over pairs. "
            "Error bars: confidence interval over pairs, from three pairs on. Pale bars are estimates.",
            half_width=True,
        )


def _head_rows(run: Run, layer: int, head: int, kv_group: int) -> pd.DataFrame:
    """The effect of the head or its KV group in every sweep, with its keys and `text`."""
    return pd.DataFrame(
        [
            {**unit, **effects.key, "text": effect_text(effects, unit, EFFECT)}
            for effects in run.derived(sweeps)
            for unit in units_of_head(effects, layer, head, kv_group)
        ]
    )


def _sweep_charts(run: Run, effects: Effects) -> Iterator[Chart]:
    texts = {result.question: sentence(result) for result in unit_results(effects)}
    yield Chart(plots.plot_matrix(effects), MATRIX_CAPTION, texts["patching.top"], half_width=True)
    if agreements(effects):
        yield Chart(
            plots.plot_agreement(effects),
            "One point per head or KV group that was both estimated and patched. On the dashed line the estimate "
            "equals the exact effect.",
            texts.get("patching.agreement", ""),
            half_width=True,
        )
    if pairs := parts_of_sweep(run.derived(pair_sweeps), effects):
        yield Chart(plots.plot_parts(effects, pairs, "subset"), PAIR_CAPTION, half_width=True)
    if spans := parts_of_sweep(run.derived(span_sweeps), effects):
        yield Chart(plots.plot_parts(effects, spans, "span"), SPAN_CAPTION, half_width=True)
    for position_map in run.derived(unit_maps):
        if position_map.key.items() <= effects.key.items():
            yield _map_chart(position_map, plot_positions(position_map), POSITION_CAPTION)


def _layer_charts(context: RenderContext) -> Iterator[Chart]:
    """Layer x position of the pairs of each set, and the mean effect of each layer."""
    for position_map in _maps_of_model(context, layer_maps):
        yield _map_chart(position_map, plot_positions(position_map), LAYER_POSITION_CAPTION)
    for effects in context.run.derived(layer_sweeps):
        if effects.model == context.selected_model:
            texts = [sentence(result) for result in layer_sweep_results(effects)]
            yield Chart(plot_layers(effects), LAYER_CAPTION, texts[0], half_width=True)


def _entry_charts(context: RenderContext) -> Iterator[Chart]:
    """Destination x source of the pairs of each set, for the heads of largest effect."""
    for position_map in _maps_of_model(context, entry_maps):
        yield _map_chart(position_map, plot_entries(position_map), ENTRY_CAPTION)


def _maps_of_model(context: RenderContext, maps: Callable[[Run], Sequence[PositionMap]]) -> Iterator[PositionMap]:
    return (one for one in context.run.derived(maps) if one.key["model"] == context.selected_model)


def _map_chart(position_map: PositionMap, figure: go.Figure, caption: str) -> Chart:
    """The map of every pair, of which a menu selects one."""
    menu = describe_choices(len(pairs_in_menu(position_map)), len(position_map.pairs), "pairs")
    return Chart(figure, f"{caption}{menu} {sentence(map_result(position_map))}")


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
