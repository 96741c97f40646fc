"""Comparison of the effects of two models, over the samples that both have."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from headscope.effects.statistics import rank_correlation, simultaneous_interval
from headscope.effects.sweep import Effects


@dataclass(frozen=True, eq=False)
class Comparison:
    """The effects of the units that two models share, over the same samples."""

    units: pd.DataFrame
    """One row per unit: its keys, `before`, `after`, `change` (mean effects and their difference), and `is_exact`:
    measured in both models."""
    n: int
    """Number of samples that both models have."""
    before: pd.DataFrame
    """Effects of the measured units of the first model, by shared sample (columns)."""
    after: pd.DataFrame
    """Effects of the measured units of the second model, by shared sample (columns)."""

    @property
    def largest_change(self) -> pd.Series:
        """The unit of largest absolute change, measured or not."""
        return self.units.iloc[int(self.units["change"].abs().argmax())]

    @property
    def rank_correlation(self) -> tuple[float, float, float]:
        """Rank correlation of the effects over all units, measured or not, and the ends of its 95 % interval."""
        return rank_correlation(self.units["after"], self.units["before"])

    @property
    def changes(self) -> pd.DataFrame:
        """The changes of the units that were measured in both models, by shared sample (columns)."""
        common = self.before.index.intersection(self.after.index)
        return self.after.loc[common] - self.before.loc[common]

    def simultaneous_changes(self) -> pd.DataFrame:
        """Change of every unit that was measured in both models: `change`, and `low` and `high`, which hold for all
        units together with 95 %; NaN below three samples."""
        changes = self.changes
        low, high = simultaneous_interval(changes.to_numpy(dtype=np.float64), max(len(changes), 1))
        return pd.DataFrame({"change": changes.mean(axis=1), "low": low, "high": high}, index=changes.index)


def compare_effects(before: Effects, after: Effects) -> Comparison:
    """Compare the sweeps of two models over the samples that both have. Units without values by sample do not count."""
    samples = [*before.values.columns.intersection(after.values.columns)]
    exact = [one.exact_values[samples] for one in (before, after)]
    means = [one.values[samples].mean(axis=1) for one in (before, after)]
    both = pd.DataFrame({"before": means[0], "after": means[1]}).dropna()
    is_exact = both.index.isin(exact[0].index) & both.index.isin(exact[1].index)
    units = both.assign(change=both["after"] - both["before"], is_exact=is_exact).reset_index()
    return Comparison(units, len(samples), *exact)
