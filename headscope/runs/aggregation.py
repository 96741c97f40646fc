"""Means over documents with their intervals, and small things that every probe needs to form them.

An interval says, at 95 %, how far other documents might move the number: from eight documents on it is the percentile
bootstrap over them (2000 seeded draws), from three on Student's t. One or two documents give none (NaN).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

HEAD_KEYS = ["model", "layer", "head", "kv_group"]
"""What names a row of the per-head table."""

BOOTSTRAP_DRAWS = 2000


MIN_DOCUMENTS, MIN_BOOTSTRAP_DOCUMENTS = 3, 8
"""Fewest documents that give an interval or a test, and fewest that are drawn from."""


def confidence_interval(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """95 % interval [2, units] of the mean of `values` [units, documents]; NaN below three documents.

    All units share the bootstrap's draws, so intervals of units measured on the same documents can be compared.
    """
    units, documents = values.shape
    if documents < MIN_DOCUMENTS:
        return np.full((2, units), np.nan)
    if documents < MIN_BOOTSTRAP_DOCUMENTS:
        reach = stdtrit(documents - 1, 0.975) * values.std(axis=1, ddof=1) / np.sqrt(documents)
        return np.asarray([values.mean(axis=1) - reach, values.mean(axis=1) + reach])
    draws = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), size=BOOTSTRAP_DRAWS)
    bounds: npt.NDArray[np.float64] = np.quantile(values @ draws.T / documents, [0.025, 0.975], axis=1)
    return bounds


def plain_types(frame: pd.DataFrame) -> pd.DataFrame:
    """Labels as strings, so that groups of absent labels do not appear, and float64 for sums."""
    kinds = {name: "float64" for name in frame if frame[name].dtype == "float32"}
    labels = {name: "str" for name in frame if frame[name].dtype == "category"}
    return frame.astype({**kinds, **labels})


def rows_at_longest_length(frame: pd.DataFrame, by: Sequence[str] = ("model",)) -> pd.DataFrame:
    """The rows at the longest length of each model, or of what else these columns tell apart."""
    return frame[frame["context_length"] == frame.groupby([*by])["context_length"].transform("max")]


def mean_losses(rows: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Mean loss (nats/token) by these columns: over bins of position, their `nll` (float64) weighted by `tokens`."""
    sums = rows.assign(nll=rows["nll"] * rows["tokens"]).groupby([*by], observed=True)[["nll", "tokens"]].sum()
    mean: pd.Series = sums["nll"] / sums["tokens"]
    return mean


def mean_with_interval(values: pd.Series, name: str, least: float = -np.inf, most: float = np.inf) -> pd.DataFrame:
    """Mean over documents of `values` (the last index level is doc) with its interval: name, name_low, name_high.

    The interval ends where the values themselves must, at `least` and `most`.
    """
    blocks = []
    for _, block in values.groupby(level="model"):
        table = block.unstack("doc")  # one block per model, whose heads all have the same documents
        numbers = table.to_numpy(dtype=np.float64)
        low, high = confidence_interval(numbers).clip(least, most)
        columns = {name: numbers.mean(axis=1), f"{name}_low": low, f"{name}_high": high}
        blocks.append(pd.DataFrame(columns, index=table.index))
    return pd.concat(blocks)
