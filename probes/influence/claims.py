"""Claims of the paper about head influence and retrieval heads. The paper has no thresholds; those here are ours.

Resets of AdaRoPE parameters to the start of training: the effects have a heavy tail, the top heads are in it, and the
effects add up. Changes scored on answers: the top heads have the largest influence.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from headscope.effects.ranking import margin_interval, margin_over_rank
from headscope.effects.statistics import TOP_FRACTION, top_unit_count
from headscope.effects.sweep import Effects
from headscope.effects.units import unit_nouns
from headscope.estimates import EXACT
from headscope.heads import format_head
from headscope.results.result import Bound, Result
from headscope.results.verdicts import judge
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.influence.analysis import (
    covers_all_units,
    set_sweeps,
    sweeps_without_bands,
    top_heads_by_statistic,
    unit_of_head,
)
from probes.influence.details import concentration, rank_details, sweep_details, top_head_details

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
