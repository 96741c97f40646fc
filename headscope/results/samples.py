"""Results from values by sample, and from columns of the per-head table: mean, interval, number of samples."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from headscope.base.heads import EXACT, method_column
from headscope.results.result import Result
from headscope.runs.aggregation import confidence_interval, wilson_interval
from headscope.runs.column_metadata import statistic

Limits = tuple[float, float]
"""Smallest and largest possible value of a statistic."""


def mean_result(question: str, by_sample: pd.Series, limits: Limits = (-math.inf, math.inf), **fields: Any) -> Result:
    """The mean of the values by document, pair or trial (the index), with its 95 % confidence interval.

    The interval ends at the `limits` of the values.
    """
    interval = confidence_interval(by_sample.to_numpy(np.float64)[None]).clip(*limits)
    return _sample_result(question, by_sample, interval, fields)


def share_result(question: str, outcomes: pd.Series, **fields: Any) -> Result:
    """The share of successes among outcomes (0 or 1) by pair or trial (the index), with its interval (Wilson)."""
    return _sample_result(question, outcomes, wilson_interval(outcomes.mean(), len(outcomes)), fields)


def _sample_result(question: str, by_sample: pd.Series, interval: npt.ArrayLike, fields: Mapping[str, Any]) -> Result:
    values = by_sample.to_numpy(np.float64)
    low, high = np.ravel(interval).tolist()
    samples = dict(zip(map(str, by_sample.index), values.tolist(), strict=True))
    mean = float(values.mean())
    return Result(question=question, value=mean, low=low, high=high, n=len(values), by_sample=samples, **fields)


def head_result(question: str, row: Mapping[Any, Any] | pd.Series, column: str, n: int, **fields: Any) -> Result:
    """A statistic of one row of the per-head table, with its interval over n samples."""
    low, high = (float(row.get(f"{column}_{end}", math.nan)) for end in ("low", "high"))
    return Result(
        question=question,
        value=float(row[column]),
        low=low,
        high=high,
        n=n,
        model=str(row["model"]),
        layer=int(row["layer"]),
        head=int(row["head"]),
        is_exact=row.get(method_column(column), EXACT) == EXACT,
        **fields,
    )


def extreme_head_result(
    question: str, heads: pd.DataFrame, column: str, n: int, limits: Limits, smallest: bool = False, **fields: Any
) -> Result:
    """The largest (or smallest) value of a statistic among the heads of one model, over n samples.

    Its interval allows for the choice, within the `limits` of the statistic.
    """
    values = heads[column].dropna().sort_values()
    result = head_result(question, heads.loc[values.index[0 if smallest else -1]], column, n, **fields)
    return allow_for_choice(result, len(values), limits, statistic(column).log_scale)


def allow_for_choice(result: Result, units: int, limits: Limits, is_logarithmic: bool = False) -> Result:
    """The result of a unit that was selected as the largest or smallest of `units`.

    Its interval of Student's t over n samples is widened to hold for all units at once (Bonferroni), within `limits`.
    """
    if not result.has_interval or units < 2 or result.n is None:
        return result
    to_scale, from_scale = (np.log, np.exp) if is_logarithmic else (np.asarray, np.asarray)
    value, *ends = to_scale([result.value, result.low, result.high])
    half = max(abs(end - value) for end in ends)  # one end may be cut off at a limit
    half *= stdtrit(result.n - 1, 1 - 0.025 / units) / stdtrit(result.n - 1, 0.975)
    low, high = from_scale([value - half, value + half]).clip(*limits)
    return replace(result, low=float(low), high=float(high), selected_from=units)
