"""Results of activation patching: the pairs, every sweep, named spans, single heads, and comparisons of models."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.base.heads import EXACT
from headscope.rendering.blocks import Overview
from headscope.rendering.text import head_mask
from headscope.results.answers import answer_questions, answer_results
from headscope.results.effects.prompts import subset_result
from headscope.results.effects.ranking import largest_unit, rank
from headscope.results.effects.results import sweep_questions, sweep_results
from headscope.results.effects.sweep import Effects, rows_of_sweep
from headscope.results.effects.units import unit_fields, unit_name, unit_nouns, unit_result, units_of_head
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.patching import PROBE
from probes.patching.analysis import (
    layer_sweeps,
    model_results,
    pair_metrics,
    pair_sweeps,
    pairs_usable_in_all_models,
    patch_tables,
    set_sweeps,
    span_sweeps,
    sweeps,
)
from probes.patching.declaration import ACTIVATION_LABELS, LAYER_ACTIVATION_LABELS, PATCHING, describe_min_difference
from probes.patching.position_maps import LABELS, PositionMap, entry_maps, layer_maps, unit_maps

TOPIC = "Activation patching"
_SWEEP = "{direction:capital} of the {activation}, {prompts}"
_SUBJECT = f"{_SWEEP}, in {{model}}"
_AT_SPAN = f"{_SUBJECT}[, only at the positions of {{span:positions}}]"
_EFFECT: dict[str, Any] = {"number": "+.2f", "samples": "pairs"}

EFFECT = Question(
    name="patching.head",
    sentence=f"{_SUBJECT}: the effect of {{unit}} is {{value}}[, rank {{rank:,}} of {{units:,}} {{nouns}} by size]",
    **_EFFECT,
)
"""The effect of one head or KV group."""

LAYER_EFFECT = Question(
    name="patching_layers.layer",
    sentence=f"{_AT_SPAN}: the effect of layer {{patched_layer}} is {{value}}",
    **_EFFECT,
)
"""The effect of one layer."""

QUESTIONS = (
    *answer_questions("patching", "pairs", has_corrupted=True),
    *sweep_questions("patching", _SUBJECT, "{direction:capital} of {intervention}, {prompts}", **_EFFECT),
    Question(
        name="patching.pair",
        sentence=f"{_SWEEP}, [pair {{pair}}][group {{group}}], in {{model}}: {{unit}} has the largest effect, {{value}}"
        "[, followed by {next:+.2f}][; the most negative is that of {negative:+.2f}]; the {label} is {clean:.2f} for "
        "clean and {corrupted:.2f} for corrupted prompts",
        headline="{direction:capital} of {intervention}, {prompts}, [pair {pair}][group {group}]: {unit} {value}"
        "[, {next:+.2f}][; negative: {negative:+.2f}]",
        level="row",
        **_EFFECT,
    ),
    Question(
        name="patching.span",
        sentence=f"{_AT_SPAN}: the effect of largest size is that of {{unit}}, {{value}}",
        **_EFFECT,
    ),
    EFFECT,
    Question(
        name="patching.set",
        sentence=f"{_AT_SPAN}: with all {{size:,}} named {{nouns}} patched together, the effect is {{value}}",
        headline="{direction:capital} of {intervention}, {prompts}[, at {span:positions}], {size:,} named {nouns} "
        "together: {value}",
        level="headline",
        **_EFFECT,
    ),
    LAYER_EFFECT,
    *sweep_questions(
        "patching_layers",
        _AT_SPAN,
        "{direction:capital} of {intervention}, {prompts}[, at {span:positions}]",
        unit="layer {patched_layer}",
        **_EFFECT,
    ),
    Question(
        name="patching.position",
        sentence="{direction:capital} of the {activation} at single positions, {prompts}, in {model}: {leads} is that "
        "of {place}, {value}[, followed by {next:+.2f}][; the most negative is that of {lowest:+.2f}]",
        headline="{direction:capital} of {intervention} by position, {prompts}: {place} {value}[, {next:+.2f}]"
        "[; negative: {lowest:+.2f}]",
        level="row",
        **_EFFECT,
    ),
    Question(
        name="patching.models",
        sentence=f"{_SWEEP}, {{model}} against {{baseline}}, over the same {{pairs:n pairs}}: the rank correlation of "
        "the effects of {compared:,} {nouns} is {value}[; {estimated:,} of them are estimated in at least one model]",
        number=".2f",
    ),
    Question(
        name="patching.largest_change",
        sentence=f"{_SWEEP}, {{model}} against {{baseline}}: the largest change is that of {{unit}}, from "
        "{before:+.2f} to {after:+.2f}, {value}",
        **_EFFECT,
    ),
    Question(
        name="patching.kept",
        topic=TOPIC,
        statement=f"{_SWEEP}: the {{top:,}} {{nouns}} of largest exact effect in {{baseline}} keep at least "
        "{share:percent} of their summed effect in {model}",
        sentence="{heads:words}[: the sum is {before:+.2f} in {baseline} and {after:+.2f} in {model}; {model} minus "
        "{share:percent} of {baseline} is {value}]",
        criterion="fixed before the shipped runs were measured",
        **_EFFECT,
    ),
    Question(
        name="patching.changed",
        topic=TOPIC,
        statement=f"{_SWEEP}: from {{baseline}} to {{model}}, the effect of at least one unit changes by more than "
        "{limit} in either direction",
        sentence="of {compared:,} {nouns} patched exactly in both models, the absolute change exceeds {limit} in "
        "{changed:,}, is below {limit} in {stable:,}, and is undecided in {undecided:,}[; about {needed:n pairs} would "
        "decide at the spread seen]. The largest is that of {unit}, from {before:+.2f} to {after:+.2f}, {value}",
        criterion="decided by intervals that hold for all these {nouns} at once",
        **_EFFECT,
    ),
)


def layer_results(run: Run) -> Iterator[Result]:
    """The results of every sweep of layers."""
    for effects in run.derived(layer_sweeps):
        yield from layer_sweep_results(effects)


def layer_sweep_results(effects: Effects) -> Iterator[Result]:
    """Results about the layers of one sweep."""
    details = {"activation": LAYER_ACTIVATION_LABELS[effects.key["intervention"]]}
    yield from sweep_results(effects, "patching_layers", "layers", details, _layer_fields)


def _layer_fields(unit: pd.Series) -> dict[str, Any]:
    return {"details": {"patched_layer": int(unit["layer"])}}


TOP_TOKENS = 2
"""Texts of tokens that a result names for either sign."""
CANDIDATES = 200
"""Largest effects among which they are chosen."""
SMALLEST = 0.005
"""A smaller effect is not named, because it would be written as 0.00."""


def position_results(run: Run) -> Iterator[Result]:
    """One result for each map of heads, layers and pattern entries."""
    for maps in (unit_maps, layer_maps, entry_maps):
        yield from map(map_result, run.derived(maps))


def map_result(position_map: PositionMap) -> Result:
    """The positions of the largest effects over all pairs, each with its unit, and those of the most negative effects.

    They are ordered by the change of the metric, so that a pair whose metric hardly differs between its prompts does
    not lead. Cells at the same token text count once, and so do those at tokens that differ between the prompts.
    """
    positive, negative = (_largest_cells(position_map, sign) for sign in (1, -1))
    largest = position_map.rows["effect"].abs().argmax()
    ranked = positive or negative or [position_map.rows.iloc[int(largest)]]
    first, *others = ranked
    where = {name: position_map.key[name] for name in ("prompts", "metric", "intervention", "direction")}
    kinds = (positive, "the largest effect"), (negative, "no effect is positive: the most negative one")
    details = {
        "activation": LABELS[where["intervention"]],
        "leads": next((text for cells, text in kinds if cells), "the effect of largest size"),
        "place": _describe_cell(position_map, first),
        "next": {_describe_cell(position_map, cell): float(cell["effect"]) for cell in others},
        "lowest": {_describe_cell(position_map, cell): float(cell["effect"]) for cell in negative if positive},
        "pair": str(first["pair"]),
        **{column: int(first[column]) for column in position_map.place_columns},
    }
    is_layer = "head" not in first
    return Result(
        question="patching.position",
        model=position_map.key["model"],
        value=float(first["effect"]),
        is_exact=first["method"] == EXACT,
        where=where,
        details=details | ({"patched_layer": int(first["layer"])} if is_layer else {}),
        **({} if is_layer else unit_fields(first)),
    )


def _largest_cells(position_map: PositionMap, sign: int) -> list[pd.Series]:
    """Up to `TOP_TOKENS` cells of effects of this sign, largest first, each at another token text."""
    rows = position_map.rows
    change = sign * rows["effect"] * (rows["metric_clean"] - rows["metric_corrupted"]).abs()
    largest = change[sign * rows["effect"] >= SMALLEST].nlargest(CANDIDATES)
    cells: dict[Any, pd.Series] = {}
    for _, cell in rows.loc[largest.index].iterrows():
        cells.setdefault(position_map.token_kind(cell), cell)
    return [*cells.values()][:TOP_TOKENS]


def _describe_cell(position_map: PositionMap, cell: pd.Series) -> str:
    pair = f" of {cell['pair']}" if len(position_map.pairs) > 1 else ""
    return f"{position_map.describe_place(cell)}{pair}"


def results(run: Run) -> Iterator[Result]:
    """Results about the pairs, every sweep, every span, and the changes from the first model to the others."""
    if not patch_tables(run):
        return
    metrics = run.derived(pair_metrics)
    limits = {name: describe_min_difference(name) for name in metrics["metric"].unique()}
    yield from answer_results("patching", metrics, run.derived(pairs_usable_in_all_models), limits)
    yield from position_results(run)
    for effects in run.derived(pair_sweeps):
        yield subset_result(effects, "patching.pair", metrics, sweep_details(effects))
    for effects in run.derived(sweeps):
        yield from unit_results(effects)
    for effects in run.derived(span_sweeps):
        largest = largest_unit(effects, by_size=True)
        yield unit_result(effects, largest, "patching.span", details=sweep_details(effects))
    for effects in run.derived(set_sweeps):
        yield _set_result(effects)
    yield from layer_results(run)
    yield from model_results(run)


def unit_results(effects: Effects) -> Iterator[Result]:
    """Results about the units of one sweep."""
    yield from sweep_results(effects, "patching", unit_nouns(effects.units), sweep_details(effects))


def _set_result(effects: Effects) -> Result:
    """The effect of all named heads, or their KV groups, patched together."""
    unit = effects.units.iloc[0]
    nouns = "KV groups" if effects.key["intervention"] in ("k", "v") else "heads"
    details = sweep_details(effects) | {"size": int(unit["size"]), "nouns": nouns}
    return unit_result(effects, unit, "patching.set", details=details)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The effect of a head or its KV group on every prompt set, with its rank."""
    if PATCHING.name not in run.tables:
        return
    groups = run.heads.loc[head_mask(run.heads, layer, head), "kv_group"]
    for effects in run.derived(sweeps):
        if effects.model != model or groups.empty:
            continue
        sizes = effects.units["effect"].abs()
        for unit in units_of_head(effects, layer, head, groups.iloc[0]):
            own_rank = rank(sizes, abs(unit["effect"])) if len(sizes) > 1 else None
            place = {"rank": own_rank, "units": len(sizes), "nouns": unit_nouns(effects.units)}
            yield unit_result(effects, unit, "patching.head", details={**sweep_details(effects), **place})


def sweep_details(effects: Effects) -> dict[str, str]:
    """What names a sweep in sentences besides its keys."""
    return {"activation": ACTIVATION_LABELS[effects.key["intervention"]]}


def overview(run: Run) -> Overview | None:
    """One row per sweep: pairs, the mean metric of both prompts, and the unit of largest effect."""
    if not patch_tables(run):
        return None
    records = []
    metrics = run.derived(pair_metrics)
    for effects in [*run.derived(sweeps), *run.derived(layer_sweeps)]:
        pairs = metrics[metrics["pair"].isin(effects.values.columns)]
        key = {name: effects.key[name] for name in ("prompts", "metric")}
        pairs = rows_of_sweep(pairs, {"model": effects.model, **key})
        largest = largest_unit(effects)
        is_layer = effects.sweep.units == ("layer",)
        records.append(
            {
                "model": effects.model,
                **effects.where,
                "pairs": int(effects.units["n"].max()),
                "clean": pairs["metric_clean"].mean(),
                "corrupted": pairs["metric_corrupted"].mean(),
                "most positive effect": f"layer {largest['layer']}" if is_layer else unit_name(largest),
                **{name: largest[name] for name in ("effect", "low", "high", "method")},
            }
        )
    return Overview(PROBE.name, pd.DataFrame(records))
