"""Statistics of the effects of many units: concentration and rank correlations."""

import math

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.aggregation import MIN_DOCUMENTS, NORMAL_QUANTILE, confidence_interval

MIN_COMPARED = 10
"""Fewest units over which an agreement of two orders is a result [ours]."""
TOP_FRACTION = 0.05
"""Share of units in the tail of a distribution of effects."""


def top_unit_count(units: int) -> int:
    """Number of units in the top 5 %, rounded up."""
    return math.ceil(TOP_FRACTION * units)


def top_share(effects: npt.ArrayLike) -> float:
    """Share of the total positive effect that the top 5 % of units contribute, 0..1; 0 if no effect is positive."""
    rises = np.sort(np.asarray(effects, dtype=np.float64).clip(min=0))[::-1]
    return float(rises[: top_unit_count(len(rises))].sum() / rises.sum()) if rises.sum() else 0.0


def top_share_interval(values: pd.DataFrame) -> tuple[float, float]:
    """95 % confidence interval of `top_share` over samples, by the jackknife with Student's t; NaN below three.

    `values` has one row per unit and one column per sample.
    """
    count = values.shape[1]
    if count < MIN_DOCUMENTS:
        return math.nan, math.nan
    share = top_share(values.mean(axis=1))
    without = [top_share(values.drop(columns=sample).mean(axis=1)) for sample in values]
    low, high = confidence_interval((count * share - (count - 1) * np.array(without))[None])[:, 0]
    return float(max(low, 0)), float(min(high, 1))


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
    too narrow. The correlation is NaN below three units, the interval below four units or for a correlation of ±1.
    """
    count = len(first)
    correlation = float(first.corr(second, "spearman")) if count > 2 else math.nan
    if count < 4 or not abs(correlation) < 1:
        return correlation, math.nan, math.nan
    half_width = NORMAL_QUANTILE * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    centre = math.atanh(correlation)
    return correlation, math.tanh(centre - half_width), math.tanh(centre + half_width)
