"""Comparison of the effects of two models, over the samples that both have."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from headscope.effects.statistics import rank_correlation
from headscope.effects.sweep import Effects
from headscope.runs.aggregation import confidence_interval


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
