"""Order of the units of a sweep: the largest with an interval that allows for the choice, ranks, margins."""

import numpy as np
import pandas as pd

from headscope.effects.sweep import Effects
from headscope.runs.aggregation import confidence_interval


def largest_unit(effects: Effects, ascending: bool = False, by_size: bool = False) -> pd.Series:
    """The unit of largest effect (`by_size`: absolute effect; `ascending`: lowest effect) of the measured ones.

    It is one of all if every unit was only estimated. `low` and `high` are corrected for the choice, see
    `chosen_unit`.
    """
    values = effects.candidates["effect"].abs() if by_size else effects.candidates["effect"]
    return chosen_unit(effects, effects.units.loc[values.sort_values(ascending=ascending, kind="stable").index[0]])


def chosen_unit(effects: Effects, unit: pd.Series) -> pd.Series:
    """A unit that was chosen for its effect: `low` and `high` are simultaneous over the candidates.

    Their number is `selected_from`. The interval also covers in at least 95 % of tables if estimates from the same
    samples selected the candidates by root mean square (simulated), because these have a larger spread.
    """
    corrected = unit.copy()
    corrected["selected_from"] = len(effects.candidates)
    if pd.notna(unit["low"]):
        values = np.array([[*effects.by_sample(unit).values()]])
        corrected["low"], corrected["high"] = confidence_interval(values, choices=len(effects.candidates))[:, 0]
    return corrected


def rank(values: pd.Series, value: float) -> int:
    """Rank of a value among the effects (or absolute effects) of all units, from 1 for the largest."""
    return int((values > value).sum()) + 1


def margin_over_rank(effects: Effects, unit: pd.Series, rank: int) -> tuple[float, float, float]:
    """The effect of `unit` minus that of the unit that is `rank`-th among the others, with its 95 % interval.

    Above 0 the unit is among the top `rank`. Paired by sample; only units with values by sample count.
    """
    key = effects.unit_key(unit)
    rival = effects.values.drop(index=[key]).mean(axis=1).nlargest(rank).index[-1]
    difference = (effects.values.loc[key] - effects.values.loc[rival]).dropna().to_numpy(dtype=np.float64)
    low, high = confidence_interval(difference[None])[:, 0]
    return float(difference.mean()), float(low), float(high)
