"""Means over documents with their intervals, and small things that every probe needs to form them.

An interval is the 95 % percentile bootstrap over documents (2000 seeded draws), which says how far other documents
might move the number. From one document there is no interval (NaN); from two or three it is too narrow.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd

HEAD_KEYS = ["model", "layer", "head", "kv_group"]
"""What names a row of the per-head table."""

DRAWS = 2000


def bootstrap(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """95 % percentile bootstrap [2, units] of the mean of `values` [units, documents]; NaN below two documents.

    All units share the draws, so intervals of units measured on the same documents can be compared.
    """
    units, documents = values.shape
    if documents < 2:
        return np.full((2, units), np.nan)
    draws = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), size=DRAWS)
    interval: npt.NDArray[np.float64] = np.quantile(values @ draws.T / documents, [0.025, 0.975], axis=1)
    return interval


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Labels as strings, so that groups of absent labels do not appear, and float64 for sums."""
    kinds = {name: "float64" for name in frame if frame[name].dtype == "float32"}
    labels = {name: "str" for name in frame if frame[name].dtype == "category"}
    return frame.astype({**kinds, **labels})


def at_longest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows at the longest length of each model."""
    return frame[frame["context_length"] == frame.groupby("model")["context_length"].transform("max")]


def with_interval(values: pd.Series, name: str) -> pd.DataFrame:
    """Mean over documents of `values` (the last index level is doc) with its interval: name, name_low, name_high."""
    blocks = []
    for _, block in values.groupby(level="model"):
        table = block.unstack("doc")  # one block per model, whose heads all have the same documents
        numbers = table.to_numpy(dtype=np.float64)
        low, high = bootstrap(numbers)
        columns = {name: numbers.mean(axis=1), f"{name}_low": low, f"{name}_high": high}
        blocks.append(pd.DataFrame(columns, index=table.index))
    return pd.concat(blocks)
