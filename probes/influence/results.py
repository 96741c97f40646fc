"""Results of the influence probe: every sweep, sets of units, bands of rotary pairs, and one head."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from headscope.base.ablation_names import describe_ablation
from headscope.base.heads import EXACT, format_head
from headscope.rendering.text import head_mask
from headscope.results.effects.ranking import largest_unit, margin_interval, margin_over_rank, rank
from headscope.results.effects.results import sweep_results
from headscope.results.effects.statistics import TOP_FRACTION, gini, top_share, top_share_interval, top_unit_count
from headscope.results.effects.sweep import Effects
from headscope.results.effects.units import unit_nouns, unit_result
from headscope.results.result import Bound, Result
from headscope.results.verdicts import judge
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.influence import bands
from probes.influence.analysis import (
    COMPONENT_DESCRIPTIONS,
    answered_trials,
    band_sweeps,
    covers_all_units,
    named_sets,
    ranked_sets,
    set_sweeps,
    sweeps_without_bands,
    top_heads_by_statistic,
    unit_of_head,
)
from probes.influence.declaration import AREAS

TARGET_DESCRIPTIONS = {"init": "the start of training", "base": "the checkpoint's own"}
"""Text for the values to which parameters are reset."""
ESTIMATE_LABELS = {"estimate": "first-order", "second-order": "second-order", "damped": "damped second-order"}


def describe_methods(units: pd.DataFrame) -> str:
    """A clause with the methods of a sweep's units."""
    methods = units["method"].value_counts()
    orders = " and ".join(label for name, label in ESTIMATE_LABELS.items() if name in methods)
    if "exact" not in methods:
        return f"all changes are {orders} estimates"
    if not orders:
        return "all changes are exact"
    exact = int(methods["exact"])
    verb = "was" if exact == 1 else "were"
    nouns = unit_nouns(units)
    if "intervention" in units and units["intervention"].nunique() > 1:
        nouns = f"units ({nouns.removesuffix('s')} × band)"
    return f"{exact} of {len(units)} {nouns} {verb} evaluated exactly, the others estimated ({orders})"


def unit_noun(units: pd.DataFrame) -> str:
    """What one unit of a sweep is: "KV group", "head", or either."""
    is_group = units["head"] < 0
    return "KV group" if is_group.all() else "head or KV group" if is_group.any() else "head"


def _describe_component(component: str) -> str:
    if bands.is_band(component):
        return bands.describe_band(component)
    return COMPONENT_DESCRIPTIONS.get(component) or describe_ablation(component)


def describe_change(component: str, target: str, objective: str = "text") -> str:
    """Name of a change, e.g. "frequencies reset to the start of training". For answers it also names the loss."""
    text = _describe_component(component)
    text = text if target == "none" else f"{text} reset to {TARGET_DESCRIPTIONS[target]}"
    return text if objective == "text" else f"{text} (loss of the answer)"


def describe_context_length(length: int, objective: str) -> str:
    """Text with the context length of a sweep."""
    return f"{'up to ' if objective == 'answer' else ''}{length:,} tokens"


def sweep_details(effects: Effects) -> dict[str, str]:
    """What names a sweep and its units in sentences besides its keys."""
    change = describe_change(effects.key["intervention"], effects.key["target"])
    return {"change": change, "noun": unit_noun(effects.units), "nouns": unit_nouns(effects.units)}


def rank_details(effects: Effects, unit: pd.Series) -> dict[str, int | None]:
    """The rank of a unit by influence, from 1 for the largest rise of the loss, and the number of units.

    The only unit has no rank.
    """
    units = len(effects.units)
    return {"rank": rank(effects.units["effect"], unit["effect"]) if units > 1 else None, "units": units}


def top_head_details(column: str, unit: pd.Series) -> dict[str, str]:
    """The name of the top head of a statistic, and that its KV group is changed with it."""
    return {"top_head": statistic(column).best_head_name, "group_of": "the KV group of" if unit["head"] < 0 else ""}


def concentration(effects: Effects, question: str) -> Result:
    """How much of the total rise of the loss the top units contribute. An interval needs exact effects."""
    is_exact = bool(effects.is_exact.all())
    low, high = top_share_interval(effects.values) if is_exact else (math.nan, math.nan)
    details = {
        **sweep_details(effects),
        "fraction": TOP_FRACTION,
        "top": top_unit_count(len(effects.units)),
        "units": len(effects.units),
        "gini": gini(effects.units["effect"]),
        "estimated": int((~effects.is_exact).sum()) or None,
    }
    return Result(
        question=question,
        value=top_share(effects.units["effect"]),
        low=low,
        high=high,
        n=effects.values.shape[1],
        model=effects.model,
        is_exact=is_exact,
        where=effects.where,
        details=details,
    )


MIN_TOP_SHARE = 0.5
"""Share of the total rise of the loss above which the top units account for most of the influence [ours]."""


def claims(run: Run) -> Iterator[Result]:
    """The claims about every sweep that covers all units of a model."""
    adapted = {model["label"] for model in run.manifest["models"] if model["scheme_name"] == "adarope"}
    for effects in run.derived(sweeps_without_bands):
        heads = run.heads[run.heads["model"] == effects.model]
        if not covers_all_units(effects.units, heads):
            continue
        if effects.key["objective"] == "answer":
            yield from _rank_claims(heads, effects, "answer_influence.largest_head", 1)
            continue
        intervention, target = effects.key["intervention"], effects.key["target"]
        if effects.model not in adapted or target != "init" or intervention not in ("joint", "freq", "scale"):
            continue
        tail = concentration(effects, "influence.heavy_tail")
        details = {**tail.details, "minimum_share": MIN_TOP_SHARE}
        yield _judged(replace(tail, details=details), effects, MIN_TOP_SHARE)
        yield from _rank_claims(heads, effects, "influence.tail_head", top_unit_count(len(effects.units)))
        for sets in run.derived(set_sweeps) if intervention == "joint" else ():
            ranked = sets.units[sets.units["choice"] == "top"]
            if sets.key == effects.key and len(ranked):
                yield _small_parts(effects, sets, ranked.sort_values("size").iloc[-1])


def _judged(result: Result, effects: Effects, threshold: float = 0.0) -> Result:
    """The result with the verdict that its value is above the threshold. Estimated units decide nothing."""
    estimated = int((~effects.is_exact).sum())
    details = {**result.details, "estimated": estimated, "unit_nouns": unit_nouns(effects.units)}
    if not estimated:
        return judge(result, Bound("above", threshold))
    unsure = replace(result, details=details, is_exact=False, low=math.nan, high=math.nan)
    return judge(unsure, Bound("above", threshold), "estimated")


def _rank_claims(heads: pd.DataFrame, effects: Effects, question: str, top: int) -> Iterator[Result]:
    """Claims that the top head of each statistic, or its KV group, is among the `top` units of largest influence.

    The evidence is the difference to the unit that is `top`-th among the others, paired by document.
    """
    samples = effects.values.dropna(axis=1).shape[1]  # those that all units share
    if len(effects.units) < 2 or not samples:  # the only unit has no rival
        return
    for column, head in top_heads_by_statistic(heads).items():
        unit = unit_of_head(effects, head)[0]
        difference, low, high = margin_over_rank(effects, unit, top)
        details = {
            **sweep_details(effects),
            **rank_details(effects, unit),
            **top_head_details(column, unit),
            "top": top,
            "fraction": TOP_FRACTION,
            "head_name": format_head(int(head["layer"]), int(head["head"])),
            "statistic_label": statistic(column).label,
            "score": float(head[column]),
            "effect": float(unit["effect"]),
            "effect_low": float(unit["low"]),
            "effect_high": float(unit["high"]),
            "estimate": "" if unit["method"] == EXACT else "an estimate",
        }
        result = Result(
            question=question,
            value=difference,
            low=low,
            high=high,
            n=samples,
            model=effects.model,
            layer=int(head["layer"]),
            head=int(head["head"]),
            where=effects.where | {"statistic": column},
            details=details,
        )
        yield _judged(result, effects)


def _small_parts(effects: Effects, sets: Effects, all_units: pd.Series) -> Result:
    """The claim that the effect of every single unit is below a quarter of the effect of all units."""
    together = sets.values.loc[sets.unit_key(all_units)]
    margins = (together / 4 - effects.values).dropna(axis=1)  # samples in which every unit was measured
    value, low, high = margin_interval(margins, 1)
    details = {
        **sweep_details(effects),
        "largest": float(effects.values[margins.columns].mean(axis=1).max()),
        "all_units": float(together[margins.columns].mean()),
        "units": len(effects.units),
    }
    result = Result(
        question="influence.small_parts",
        value=value,
        low=low,
        high=high,
        n=margins.shape[1],
        model=effects.model,
        where=effects.where,
        details=details,
    )
    return _judged(result, effects)


SET_NOUNS = {"group": "KV groups", "head": "heads"}
"""What a set of each kind of unit holds."""


def results(run: Run) -> Iterator[Result]:
    """The paper's claims, then the results of every sweep, of sets of units and of bands of rotary pairs."""
    yield from claims(run)
    yield from influence_results(run)


def influence_results(run: Run) -> Iterator[Result]:
    """The results of every sweep, of sets of units and of bands of rotary pairs."""
    for effects in run.derived(sweeps_without_bands):
        area, details = AREAS[effects.key["objective"]], sweep_details(effects)
        labels = {name: f"{label} estimates" for name, label in ESTIMATE_LABELS.items()}
        labels["damped"] += " (second-order terms reduced where they are large)"
        yield from sweep_results(effects, area, details["nouns"], details, estimate_labels=labels)
        if len(effects.units) > 1:
            yield concentration(effects, f"{area}.concentration")
        if area == AREAS["answer"]:
            yield from _top_head_effects(run, effects)
    yield from _answered_results(run)
    yield from _set_results(run)
    for sweeps in run.derived(band_sweeps).values():
        yield from _band_results(run, sweeps)


def _top_head_effects(run: Run, effects: Effects) -> Iterator[Result]:
    """The effect and rank of the top head of each statistic, or of its KV group."""
    for column, head in top_heads_by_statistic(run.heads[run.heads["model"] == effects.model]).items():
        for unit in unit_of_head(effects, head):  # none if the sweep covers only other named heads
            details = {**sweep_details(effects), **rank_details(effects, unit), **top_head_details(column, unit)}
            where = effects.where | {"statistic": column}
            yield unit_result(effects, unit, "answer_influence.top_head", where=where, details=details)


def _answered_results(run: Run) -> Iterator[Result]:
    """How many trials the unchanged model answers, and the largest effect over these."""
    for label, (answered, trials, sweeps) in run.derived(answered_trials).items():
        yield Result(
            question="answer_influence.answered",
            model=label,
            value=answered / trials,
            n=trials,
            details={"answered": answered},
        )
        for effects in sweeps:
            if not bands.is_band(effects.key["intervention"]):
                unit, details = largest_unit(effects), sweep_details(effects)
                yield unit_result(effects, unit, "answer_influence.answered_top", details=details)


def _set_results(run: Run) -> Iterator[Result]:
    """The effects of changing all units, or a named set of heads, together."""
    for effects in run.derived(set_sweeps):
        area = AREAS[effects.key["objective"]]
        change = {"change": describe_change(effects.key["intervention"], effects.key["target"])}
        ranked = ranked_sets(run, effects.key)
        top = ranked[ranked["choice"] == "top"].sort_values("size")
        for unit, rows in top.groupby("unit") if not bands.is_band(effects.key["intervention"]) else ():
            details = {**change, "nouns": SET_NOUNS[str(unit)], "first": rows["effect"].iloc[0]}
            yield _set_result(effects, f"{area}.all_units", rows.iloc[-1], details, {"units": str(unit)})
        for _, named in named_sets(run, effects.key).iterrows():
            yield _set_result(effects, f"{area}.named_set", named, change, {"choice": named["choice"]})


def _set_result(
    effects: Effects, question: str, row: pd.Series, details: Mapping[str, Any], where: Mapping[str, Any]
) -> Result:
    return Result(
        question=question,
        value=float(row["effect"]),
        low=float(row["low"]),
        high=float(row["high"]),
        n=int(row["n"]),
        model=effects.model,
        where={**effects.where, **where},
        details={**details, "size": int(row["size"])},
    )


def _band_results(run: Run, sweeps: list[Effects]) -> Iterator[Result]:
    """For each kind of ablation: the largest effect of one band in one unit, and those of each band in all units."""
    first = sweeps[0]
    key = {name: first.key[name] for name in ("model", "context_length", "objective")}
    for kind, description in bands.KIND_DESCRIPTIONS.items():
        of_kind = [effects for effects in sweeps if effects.key["intervention"].startswith(kind)]
        if of_kind:
            units = [(effects, largest_unit(effects)) for effects in of_kind]
            effects, unit = _largest_of(units, sum(len(one.candidates) for one in of_kind))
            together = {
                bands.pairs_label(one.key["intervention"]): effect
                for one in sorted(of_kind, key=lambda one: bands.band_sort_key(one.key["intervention"]))
                for effect in ranked_sets(run, {**key, "intervention": one.key["intervention"]}).get("effect", ())
            }
            details = {"kind": description, **sweep_details(effects), "together": together, **_pairs(effects)}
            where = {name: key[name] for name in ("context_length", "objective")} | {"intervention": kind}
            yield unit_result(effects, unit, f"{AREAS[key['objective']]}.band", where=where, details=details)


def _pairs(effects: Effects) -> dict[str, str]:
    return {"pairs": bands.pairs_label(effects.key["intervention"])}


def _largest_of(units: list[tuple[Effects, pd.Series]], choices: int) -> tuple[Effects, pd.Series]:
    """The unit of largest effect over several sweeps, with an interval that allows for the choice among all units.

    Measured units come before those that were only estimated.
    """
    effects, unit = max(units, key=lambda pair: (pair[1]["method"] == EXACT, pair[1]["effect"]))
    chosen = unit.copy()
    chosen["selected_from"] = choices
    if pd.notna(unit["low"]):
        chosen["low"], chosen["high"] = effects.interval(unit, choices)
    return effects, chosen


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """Influence and rank of a head or its KV group in each sweep of a model, and its band of largest influence."""
    rows = run.heads[head_mask(run.heads, layer, head)]
    if rows.empty:
        return
    for effects in run.derived(sweeps_without_bands):
        for unit in unit_of_head(effects, rows.iloc[0]) if effects.model == model else ():
            details = {**sweep_details(effects), **rank_details(effects, unit)}
            yield unit_result(effects, unit, f"{AREAS[effects.key['objective']]}.head", details=details)
    for (label, _, objective), sweeps in run.derived(band_sweeps).items():
        for kind in bands.KIND_DESCRIPTIONS if label == model else ():
            units = [
                (effects, unit)
                for effects in sweeps
                if effects.key["intervention"].startswith(kind)
                for unit in unit_of_head(effects, rows.iloc[0])
            ]
            if units:
                effects, unit = _largest_of(units, len(units))
                details = {**sweep_details(effects), "bands": len(units)}
                yield unit_result(effects, unit, f"{AREAS[objective]}.head_band", details=details)
