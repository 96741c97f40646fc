"""Results of the influence probe: every sweep, sets of units, bands of rotary pairs, and one head."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from headscope.effects.ranking import largest_unit
from headscope.effects.results import sweep_results
from headscope.effects.sweep import Effects
from headscope.effects.units import unit_result
from headscope.estimates import EXACT
from headscope.rendering.text import head_mask
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.influence import bands
from probes.influence.analysis import (
    answered_trials,
    band_sweeps,
    named_sets,
    ranked_sets,
    set_sweeps,
    sweeps_without_bands,
    top_heads_by_statistic,
    unit_of_head,
)
from probes.influence.claims import claims
from probes.influence.details import concentration, rank_details, sweep_details, top_head_details
from probes.influence.labels import ESTIMATE_LABELS, describe_change
from probes.influence.questions import AREAS

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
