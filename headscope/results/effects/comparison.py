"""Agreement of estimates with measured effects, and of the effects of two models, over what both have."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from headscope.results.effects.statistics import rank_correlation
from headscope.results.effects.sweep import Effects
from headscope.runs.aggregation import confidence_interval

TOP_UNITS = 10
"""Units whose overlap between estimates and measured effects is counted; at most half of the compared ones, because the
overlap of all with all is always complete."""


@dataclass(frozen=True)
class Agreement:
    """How well the estimates of one method agree with the measured effects of a sweep."""

    method: str
    spearman: float
    """Rank correlation over the compared units, with its interval over units. NaN below three units."""
    low: float
    high: float
    pearson: float
    compared: int
    """Number of units that have both."""
    selected: int
    """How many of the compared units have one of the largest estimates of all, as many as were compared: most of them
    were selected by the estimates, and over selected units a correlation is higher. 0 if every unit was measured."""
    others_spearman: float
    """Rank correlation over the other compared units, such as random ones; NaN if there are fewer than three, or if
    every unit was measured."""
    shared: int
    """Number of units among the `top` largest absolute values of both."""
    top: int
    largest_error: float
    """Largest absolute difference of an estimate to the measured effect."""
    unmeasured: int
    """Number of units that were only estimated."""
    may_exceed: int
    """How many of these would have a larger absolute effect than every measured one, if their estimate were off by the
    largest error."""


def compared_units(effects: Effects, method: str) -> pd.DataFrame:
    """The units with an estimate and a measured effect over the same samples: unit keys, `estimate`, `exact`."""
    units = effects.units[[*effects.sweep.units]].assign(
        estimate=effects.estimates[method].to_numpy(),
        exact=effects.units["effect"].where(effects.is_exact),
    )
    return units.dropna(subset=["estimate", "exact"])


def agreements(effects: Effects) -> list[Agreement]:
    """The agreement of every method of estimates that has units to compare, the most accurate first."""
    return [agreement for method in effects.estimates if (agreement := _agreement(effects, str(method))).compared]


def _agreement(effects: Effects, method: str) -> Agreement:
    units = compared_units(effects, method)
    estimate, exact = units["estimate"], units["exact"]
    top = min(TOP_UNITS, len(units) // 2)
    shared = {*estimate.abs().nlargest(top).index} & {*exact.abs().nlargest(top).index}
    error = float((estimate - exact).abs().max())
    selected = _selected_units(effects, units.index)
    others = units.drop(index=selected)
    others_spearman = rank_correlation(others["estimate"], others["exact"])[0] if len(selected) else math.nan
    largest = effects.exact["effect"].abs().max()
    unmeasured = effects.units.loc[~effects.is_exact, "effect"].abs()
    return Agreement(
        method,
        *rank_correlation(estimate, exact),
        float(estimate.corr(exact)) if len(units) > 2 else math.nan,
        len(units),
        len(selected),
        others_spearman,
        len(shared),
        top,
        error,
        len(unmeasured),
        int((unmeasured + error > largest).sum()),
    )


def _selected_units(effects: Effects, compared: pd.Index) -> pd.Index:
    """The rows of the compared units with the largest estimates of all units, as many as were compared."""
    if effects.is_exact.all():
        return compared[:0]
    sizes = pd.Series(effects.estimate_sizes.to_numpy(), effects.units.index)
    return compared.intersection(sizes.nlargest(len(compared)).index)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The effects of the units that two models share, over the same samples."""

    units: pd.DataFrame
    """One row per unit: its keys; `before`, `after` and `change`, the mean effects and their difference over `n`
    samples; `is_exact`, whether it was measured in both models; and `low` and `high` of the change, which hold for all
    measured units together with 95 %. NaN for estimates and below three samples."""
    n: int
    """Number of samples that both models have."""
    before: pd.DataFrame
    """Effects of the measured units of the first model, by shared sample (columns)."""
    after: pd.DataFrame
    """Effects of the measured units of the second model, by shared sample (columns)."""

    @property
    def exact(self) -> pd.DataFrame:
        """The units that were measured in both models."""
        return self.units[self.units["is_exact"]]

    @property
    def rank_correlation(self) -> tuple[float, float, float]:
        """Rank correlation of the effects over all units, measured or not, and the ends of its 95 % interval."""
        return rank_correlation(self.units["after"], self.units["before"])

    def changes_of(self, unit: pd.Series) -> dict[str, float]:
        """The change of a unit that was measured in both models, by sample."""
        key = tuple(unit[str(name)] for name in self.before.index.names)
        changes = self.after.loc[key] - self.before.loc[key]
        return {str(name): float(value) for name, value in changes.items()}


def largest_change(units: pd.DataFrame) -> pd.Series:
    """The unit of largest absolute change among these rows of `Comparison.units`."""
    return units.iloc[int(units["change"].abs().argmax())]


def compare_effects(before: Effects, after: Effects) -> Comparison:
    """Compare the sweeps of two models over the samples that both have. Units without values by sample do not count."""
    samples = [*before.values.columns.intersection(after.values.columns)]
    first, second = (effects.exact_values[samples] for effects in (before, after))
    means = {name: one.values[samples].mean(axis=1) for name, one in (("before", before), ("after", after))}
    units = pd.DataFrame(means).dropna()
    units["change"] = units["after"] - units["before"]
    common = first.index.intersection(second.index)
    units["is_exact"] = units.index.isin(common)
    units["n"] = len(samples)
    changes = (second.loc[common] - first.loc[common]).to_numpy(dtype=np.float64)
    low, high = confidence_interval(changes, choices=max(len(common), 1))
    intervals = pd.DataFrame({"low": low, "high": high}, index=common)
    return Comparison(units.join(intervals).reset_index(), len(samples), first, second)
