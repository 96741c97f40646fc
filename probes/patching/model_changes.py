"""How effects change from the first model of a run to another one, such as another position scheme: the rank
correlation, the largest change, whether the same heads carry the task, and whether an effect changes.

The thresholds are ours and were fixed before the packaged runs were measured. Only exact effects decide a verdict, over
the pairs that count in every model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from headscope.effects.comparison import Comparison, compare_effects, largest_change
from headscope.effects.statistics import MIN_COMPARED
from headscope.effects.units import unit_fields, unit_name, unit_nouns
from headscope.results.result import Bound, Result
from headscope.results.samples import mean_result
from headscope.results.verdicts import deciding_part, judge, judge_by_parts
from headscope.runs.aggregation import MIN_DOCUMENTS, Verdict
from headscope.runs.run import Run
from probes.patching.analysis import sweeps
from probes.patching.schema import ACTIVATION_LABELS

TOP_UNITS = 5
"""Units of largest effect in the first model, which carry the task there."""
MIN_KEPT_SHARE = 0.5
"""Share of their summed effect that they keep in a model whose task the same units carry."""
MIN_CHANGE = 0.1
"""Change of the effect of a unit that counts."""

OPPOSITE: Mapping[Verdict, Verdict] = {
    "supported": "not supported",
    "not supported": "supported",
    "inconclusive": "inconclusive",
}


def model_results(run: Run) -> Iterator[Result]:
    """The changes of each sweep of every model but the first, then two verdicts: whether the same units carry the task,
    and whether the effect of at least one unit changes."""
    by_key = {tuple(effects.key.values()): effects for effects in run.derived(sweeps)}
    for (model, *conditions), after in by_key.items():
        before = by_key.get((run.models[0], *conditions))
        if model == run.models[0] or before is None:
            continue
        comparison = compare_effects(before, after)
        details = {
            "activation": ACTIVATION_LABELS[after.key["intervention"]],
            "nouns": unit_nouns(comparison.units),
            "pairs": comparison.n,
        }
        blank = Result(question="", model=model, baseline=before.model, where=after.where, details=details)
        yield from _change_results(comparison, blank)
        if len(comparison.before):
            yield _kept(comparison, blank)
        if len(comparison.exact):
            yield _changed(comparison, blank)


def _change_results(comparison: Comparison, blank: Result) -> Iterator[Result]:
    """The rank correlation of the effects, and the unit whose effect changes most, measured or not."""
    units = comparison.units
    value, low, high = comparison.rank_correlation
    if len(units) >= MIN_COMPARED and np.isfinite(value):
        counts = {"compared": len(units), "estimated": len(units) - len(comparison.exact) or None}
        correlation = replace(blank, question="patching.models", value=value, low=low, high=high, n=len(units))
        yield _detailed(correlation, counts)
    yield replace(_largest_change(comparison, units, blank), question="patching.largest_change")


def _kept(comparison: Comparison, blank: Result) -> Result:
    """Whether the units of largest effect in the first model keep at least `MIN_KEPT_SHARE` of their summed effect."""
    top = comparison.before.loc[comparison.before.mean(axis=1).nlargest(TOP_UNITS).index]
    names = [unit_name(unit) for _, unit in top.index.to_frame().iterrows()]
    claim = replace(blank, question="patching.kept", n=comparison.n)
    claim = _detailed(claim, {"top": len(top), "share": MIN_KEPT_SHARE, "heads": names})
    if missing := int((~top.index.isin(comparison.after.index)).sum()):
        counts = {"estimated": missing, "units": len(top), "unit_nouns": claim.details["nouns"]}
        return judge(_detailed(claim, counts), Bound("above"), "estimated")
    before, after = top.sum(), comparison.after.loc[top.index].sum()
    place = {name: getattr(claim, name) for name in ("model", "baseline", "where", "details")}
    claim = mean_result("patching.kept", after - MIN_KEPT_SHARE * before, **place)
    return judge(_detailed(claim, {"before": before.mean(), "after": after.mean()}), Bound("above"))


def _changed(comparison: Comparison, blank: Result) -> Result:
    """Whether the effect of at least one unit changes by more than `MIN_CHANGE`: the opposite of that all are stable,
    by simultaneous intervals."""
    stable = judge_by_parts(
        Result(question=""), map(_stable, comparison.exact.assign(choices=len(comparison.exact)).to_dict("records"))
    )
    verdicts = [part.verdict for part in stable.parts]
    need = deciding_part(stable)
    counts = {
        "limit": MIN_CHANGE,
        "compared": len(verdicts),
        "changed": verdicts.count("not supported"),
        "stable": verdicts.count("supported"),
        "undecided": verdicts.count("inconclusive"),
        "needed": need[1] if need and comparison.n >= MIN_DOCUMENTS else None,
    }
    claim = _detailed(_largest_change(comparison, comparison.exact, blank), counts)
    reason = "" if claim.has_interval else "few"
    return replace(claim, question="patching.changed", verdict=OPPOSITE[stable.verdict], reason=reason)


def _stable(unit: Mapping[Any, Any]) -> Result:
    """The verdict on the claim that the effect of one unit changes by less than `MIN_CHANGE`."""
    change = Result(
        question="",
        value=unit["change"],
        low=unit["low"],
        high=unit["high"],
        n=unit["n"],
        selected_from=unit["choices"],
    )
    return judge(change, Bound("between", -MIN_CHANGE, MIN_CHANGE))


def _largest_change(comparison: Comparison, units: pd.DataFrame, blank: Result) -> Result:
    """The largest change among these units; its interval allows for the choice among those that were measured."""
    unit = largest_change(units)
    result = replace(
        blank,
        **unit_fields(unit),
        value=float(unit["change"]),
        low=float(unit["low"]),
        high=float(unit["high"]),
        n=comparison.n,
        is_exact=bool(unit["is_exact"]),
        selected_from=len(comparison.exact) if unit["is_exact"] else len(units),
        by_sample=comparison.changes_of(unit) if unit["is_exact"] else {},
    )
    return _detailed(result, {"before": float(unit["before"]), "after": float(unit["after"])})


def _detailed(result: Result, details: Mapping[str, Any]) -> Result:
    return replace(result, details={**result.details, **details})
