"""Order of the units of a sweep: which to measure exactly, the largest with its interval, ranks, margins."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.results.effects.sweep import Effects
from headscope.runs.aggregation import confidence_interval


def select_units(
    mean_squares: npt.ArrayLike, top_count: int, random_count: int, seed: Sequence[int]
) -> npt.NDArray[np.intp]:
    """Positions of the `top_count` units of largest mean square estimate, then of `random_count` seeded others.

    All units if there are fewer. `mean_squares` [units] are over samples: a mean would miss a head whose estimates are
    off in both directions. On the IOI pairs of TransformerLens's Exploratory Analysis Demo, the queries of largest
    effect have rank 11 by |mean| and rank 4 by root mean square.
    """
    order = np.argsort(-np.asarray(mean_squares, dtype=np.float64), kind="stable")
    top, others = order[:top_count], order[top_count:]
    drawn = np.random.default_rng(seed).permutation(len(others))[:random_count]
    return np.concatenate([top, others[np.sort(drawn)]])


def largest_unit(effects: Effects, ascending: bool = False, by_size: bool = False) -> pd.Series:
    """The unit of largest effect (`by_size`: absolute effect; `ascending`: lowest effect) of the measured ones.

    It is one of all if every unit was only estimated. `low` and `high` are corrected for the choice, see
    `chosen_unit`.
    """
    values = effects.candidates["effect"].abs() if by_size else effects.candidates["effect"]
    return chosen_unit(effects, effects.units.loc[values.sort_values(ascending=ascending, kind="stable").index[0]])


def next_units(effects: Effects, count: int, by_size: bool = False) -> pd.DataFrame:
    """The units that follow the first by positive effect, or by absolute effect, among the measured ones (all if none
    was measured)."""
    units = effects.candidates
    sizes = units["effect"].abs() if by_size else units["effect"]
    ordered = units.loc[sizes.sort_values(ascending=False, kind="stable").index[1 : count + 1]]
    return ordered if by_size else ordered[ordered["effect"] > 0]


def chosen_unit(effects: Effects, unit: pd.Series) -> pd.Series:
    """A unit that was chosen for its effect: `low` and `high` are simultaneous over the candidates.

    Their number is `selected_from`. The interval also covers in at least 95 % of tables if estimates from the same
    samples selected the candidates by root mean square (simulated), because these have a larger spread.
    """
    corrected = unit.copy()
    corrected["selected_from"] = len(effects.candidates)
    if pd.notna(unit["low"]):
        corrected["low"], corrected["high"] = effects.interval(unit, len(effects.candidates))
    return corrected


def rank(values: pd.Series, value: float) -> int:
    """Rank of a value among the effects (or absolute effects) of all units, from 1 for the largest."""
    return int((values > value).sum()) + 1


def margin_over_rank(effects: Effects, unit: pd.Series, rank: int) -> tuple[float, float, float]:
    """The effect of `unit` minus that of the unit that is `rank`-th among the others, with its 95 % interval.

    Above 0 the unit is among the top `rank`. Paired by sample; only units with values by sample count.
    """
    key = effects.unit_key(unit)
    return margin_interval(effects.values.loc[key] - effects.values.drop(index=[key]), rank)


def margin_interval(differences: pd.DataFrame, rank: int) -> tuple[float, float, float]:
    """The `rank`-th smallest of the means of `differences` [units, samples], with its 95 % interval.

    The interval does not depend on which unit seems to have that place. It is above 0 only if all units but
    `rank` - 1 have a positive mean, and below 0 only if `rank` units have a negative one, by the partial conjunction
    tests of Benjamini and Heller (2008) with Bonferroni's correction.
    """
    place = min(rank, len(differences))
    complete = differences.dropna(axis=1).to_numpy(np.float64)
    low = confidence_interval(complete, place)[0]
    high = confidence_interval(complete, len(differences) - place + 1)[1]
    value, *ends = (np.sort(ends)[place - 1] for ends in (complete.mean(axis=1), low, high))
    return float(value), float(ends[0]), float(ends[1])
