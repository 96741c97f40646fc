"""Whether the heads that carry a task in the first model of a run carry it in another one, such as another position
scheme.

The thresholds are ours and were fixed before the packaged runs were measured. Only exact effects count, over the pairs
that count in every model.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from headscope.report.blocks import Finding, FindingData
from headscope.report.text import format_percent
from headscope.runs.aggregation import MIN_DOCUMENTS, confidence_interval, verdict_above
from headscope.runs.run import Run
from probes.patching import PROBE
from probes.patching.analysis import SweepKey, exact_effects
from probes.patching.labels import describe_sweep, unit_label, unit_noun_plural

TOP_UNITS = 5
"""Units of largest effect in the first model, which carry the task there."""
MIN_KEPT_SHARE = 0.5
"""Share of their summed effect that they keep in a model whose task the same units carry."""
MIN_CHANGE = 0.1
"""Change of the effect of a unit that counts."""


def model_claims(run: Run) -> Iterator[Finding]:
    """Two verdicts for each sweep of every model but the first: whether the same units carry the task, and whether the
    effect of at least one unit changes."""
    effects = run.derived(exact_effects)
    for key, others in effects.items():
        base = effects.get((run.models[0], *key[1:]))
        if key[0] != run.models[0] and base is not None:
            pairs = [*base.columns.intersection(others.columns)]
            yield _kept_claim(run.models[0], key, base[pairs], others[pairs])
            if len(base.index.intersection(others.index)):
                yield _change_claim(run.models[0], key, base[pairs], others[pairs])


def _kept_claim(baseline: str, key: SweepKey, base: pd.DataFrame, other: pd.DataFrame) -> Finding:
    """Whether the units of largest effect in the first model keep at least `MIN_KEPT_SHARE` of their summed effect."""
    top = base.loc[base.mean(axis=1).nlargest(TOP_UNITS).index]
    names = ", ".join(unit_label(unit) for _, unit in top.index.to_frame().iterrows())
    keep, effect = ("keeps", "its effect") if len(top) == 1 else ("keep", "their summed effect")
    statement = (
        f"{_heading(key)}: the {_count_units(top)} of largest exact effect in {baseline} ({names}) {keep} at least "
        f"{format_percent(MIN_KEPT_SHARE)} of {effect} in {key[0]} (our criterion)"
    )
    missing = int((~top.index.isin(other.index)).sum())
    if missing:
        text = (
            f"{statement}: inconclusive. {missing} of the {_count_units(top)} {'was' if missing == 1 else 'were'} only "
            f"estimated in {key[0]}."
        )
        return Finding(PROBE.title, text, key[0])
    before, after = top.sum(), other.loc[top.index].sum()
    values = (after - MIN_KEPT_SHARE * before).to_numpy(dtype=np.float64)
    low, high = confidence_interval(values[None])[:, 0]
    text = (
        f"{statement}: {verdict_above(low, high)}. The sum is {before.mean():+.2f} in {baseline} and "
        f"{after.mean():+.2f} in {key[0]}; {key[0]} minus {format_percent(MIN_KEPT_SHARE)} of {baseline} is "
        f"{values.mean():+.2f}{_bounds(low, high, len(values))}."
    )
    return Finding(PROBE.title, text, key[0], data=FindingData(float(values.mean()), low, high, len(values)))


def _change_claim(baseline: str, key: SweepKey, base: pd.DataFrame, other: pd.DataFrame) -> Finding:
    """Whether the effect of at least one unit changes by more than `MIN_CHANGE`: simultaneous Bonferroni intervals."""
    common = base.index.intersection(other.index)
    changes_table = other.loc[common] - base.loc[common]
    changes = changes_table.to_numpy(dtype=np.float64)
    low, high = _simultaneous_intervals(changes)
    is_changed = (low > MIN_CHANGE) | (high < -MIN_CHANGE)
    is_stable = (low > -MIN_CHANGE) & (high < MIN_CHANGE)
    verdict = "supported" if is_changed.any() else "not supported" if is_stable.all() else "inconclusive"
    most = int(np.abs(changes.mean(axis=1)).argmax())
    change = float(changes[most].mean())
    before, after = base.loc[common[most]].mean(), other.loc[common[most]].mean()
    text = (
        f"{_heading(key)}: the effect of at least one of the {_noun(changes_table)} changes by more than {MIN_CHANGE} "
        f"in either direction from {baseline} to {key[0]} (our criterion; simultaneous 95 % confidence intervals over "
        f"{_count_units(changes_table)} patched exactly in both models): {verdict}. The absolute change exceeds "
        f"{MIN_CHANGE} in {is_changed.sum()} of {_count_units(changes_table)}, is below {MIN_CHANGE} in "
        f"{is_stable.sum()}, and is undecided in {(~is_changed & ~is_stable).sum()}. The largest is that of "
        f"{unit_label(common.to_frame().iloc[most])}, from {before:+.2f} to {after:+.2f}, {change:+.2f}"
        f"{_bounds(low[most], high[most], changes.shape[1])}."
    )
    return Finding(PROBE.title, text, key[0], data=FindingData(change, low[most], high[most], changes.shape[1]))


def _simultaneous_intervals(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Student's t intervals of the means of `values` [units, pairs] that hold for all units together with 95 %.

    NaN below three pairs.
    """
    units, pairs = values.shape
    if pairs < MIN_DOCUMENTS:
        return np.full(units, np.nan), np.full(units, np.nan)
    mean = values.mean(axis=1)
    half_width = stdtrit(pairs - 1, 1 - 0.025 / units) * values.std(axis=1, ddof=1) / np.sqrt(pairs)
    return mean - half_width, mean + half_width


def _noun(units: pd.DataFrame) -> str:
    """What the rows of a table of effects are: "heads" or "KV groups"."""
    return unit_noun_plural(units.index.to_frame())


def _count_units(units: pd.DataFrame) -> str:
    """The number of rows of a table of effects with their noun: "5 heads", "1 KV group"."""
    noun = _noun(units)
    return f"{len(units)} {noun.removesuffix('s') if len(units) == 1 else noun}"


def _heading(key: SweepKey) -> str:
    return f"{describe_sweep(key)}, {key[1]}"


def _bounds(low: float, high: float, pairs: int) -> str:
    if np.isnan(low):
        return f" ({pairs} pairs are too few for an interval)"
    return f" (95 % confidence interval {low:+.2f} to {high:+.2f}, {pairs} pairs)"
