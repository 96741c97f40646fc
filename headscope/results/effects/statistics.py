"""Statistics of the effects of many units: concentration and rank correlations."""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.aggregation import MIN_DOCUMENTS, NORMAL_QUANTILE, ratio_interval

MIN_COMPARED = 10
"""Fewest units over which an agreement of two orders is a result [ours]."""
TOP_FRACTION = 0.05
"""Share of units in the tail of a distribution of effects."""
FloatArray = npt.NDArray[np.float64]


def top_unit_count(units: int) -> int:
    """Number of units in the top 5 %, rounded up."""
    return math.ceil(TOP_FRACTION * units)


def top_share(effects: npt.ArrayLike) -> float:
    """Share of the total positive effect that the top 5 % of units contribute, 0..1; 0 if no effect is positive."""
    rises = np.sort(np.asarray(effects, dtype=np.float64).clip(min=0))[::-1]
    return float(rises[: top_unit_count(len(rises))].sum() / rises.sum()) if rises.sum() else 0.0


def top_share_interval(values: pd.DataFrame) -> tuple[float, float]:
    """95 % confidence interval of the true `top_share`, within 0..1; NaN below three samples.

    `values` has one row per unit and one column per sample. Noise makes sums over chosen units too large: the largest
    effects and the positive parts seem larger than they are. Each end takes the side that cannot favour a verdict. The
    lower end divides the sum of units that were chosen on the other half of the samples, which is at most that of the
    true top units, by the sum of all that seem positive, which is at least the true rise. The upper end divides the sum
    of those that seem largest by the sum of units that were positive on the other half. Both are Fieller's interval.
    """
    numbers = values.dropna(axis=1).to_numpy(np.float64)
    count = numbers.shape[1]
    if count < MIN_DOCUMENTS:
        return math.nan, math.nan
    halves, top, rises = np.arange(count) % 2, np.empty(count), np.empty(count)
    for half in (0, 1):
        judged = halves == half
        top[judged], rises[judged] = _sums_of_chosen(numbers[:, judged], numbers[:, ~judged].mean(axis=1))
    seeming_top, seeming_rises = _sums_of_chosen(numbers, numbers.mean(axis=1))
    low, high = ratio_interval(top, seeming_rises)[0], ratio_interval(seeming_top, rises)[1]
    return max(low, 0.0), min(high, 1.0)


def _sums_of_chosen(values: FloatArray, means: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Sums by sample of `values` [units, samples]: over the top 5 % by `means` [units] that are positive, and over all
    that are positive."""
    top = np.argsort(-means, kind="stable")[: top_unit_count(len(means))]
    return values[top[means[top] > 0]].sum(axis=0), values[means > 0].sum(axis=0)


def gini(effects: npt.ArrayLike) -> float:
    """Gini coefficient of the absolute effects: 0 if all are equal, close to 1 if one is much larger than the rest."""
    sizes = np.sort(np.abs(np.asarray(effects, dtype=np.float64)))
    if not sizes.sum():
        return 0.0
    count = len(sizes)
    return float((2 * np.arange(1, count + 1) - count - 1) @ sizes / (count * sizes.sum()))


def rank_correlation(first: pd.Series, second: pd.Series) -> tuple[float, float, float]:
    """Spearman's rank correlation over units, and the ends of its 95 % confidence interval.

    Fisher's z with the variance of Bonett and Wright (2000). Units of one model are not independent, so the interval is
    too narrow. The correlation is NaN below three units or if all values of one are equal, the interval below four
    units or for a correlation of ±1.
    """
    count = len(first)
    first, second = first.align(second, join="inner")
    has_both = first.notna() & second.notna()
    # Without scipy's warning about equal values.
    correlation = float(first[has_both].rank().corr(second[has_both].rank())) if count > 2 else math.nan
    if count < 4 or not abs(correlation) < 1:
        return correlation, math.nan, math.nan
    half_width = NORMAL_QUANTILE * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    centre = math.atanh(correlation)
    return correlation, math.tanh(centre - half_width), math.tanh(centre + half_width)
