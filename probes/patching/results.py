"""Results of activation patching: the pairs, every sweep, named spans, single heads, and comparisons of models."""

from collections.abc import Iterator

import pandas as pd

from headscope.effects.prompts import subset_result
from headscope.effects.ranking import largest_unit, rank
from headscope.effects.results import sweep_results
from headscope.effects.sweep import Effects, rows_of_sweep
from headscope.effects.units import unit_name, unit_nouns, unit_result, units_of_head
from headscope.rendering.blocks import Overview
from headscope.rendering.text import head_mask
from headscope.results.answers import answer_results
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.patching import PROBE
from probes.patching.analysis import layer_sweeps, pair_sweeps, set_sweeps, span_sweeps, sweeps
from probes.patching.effects import describe_min_difference
from probes.patching.layer_results import layer_results
from probes.patching.model_changes import model_results
from probes.patching.pairs import pair_metrics, pairs_usable_in_all_models, patch_tables
from probes.patching.position_results import position_results
from probes.patching.schema import ACTIVATION_LABELS, PATCHING


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
