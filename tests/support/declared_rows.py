"""Random rows of any declared table: every key, and values within the declared ranges."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.columns import Column, Table

LEVELS = 2
"""Values of a key column that the size of the run doesn't decide."""


def declared_rows(table: Table, sizes: Sizes, model: str, number: int = 0) -> pd.DataFrame:
    """Rows of a table about the model with this number: every combination of the levels of its keys."""
    rng = np.random.default_rng([sizes.seed, number])
    units = [name for name in ("layer", "head", "kv_group") if name in table.keys]
    levels: Mapping[str, Sequence[Any]] = {
        "model": [model],
        "context_length": sizes.lengths,
        "doc": [f"synthetic/{doc}" for doc in range(sizes.docs)],
        "pair": range(sizes.pairs),
    }
    rows = sizes.units[units].drop_duplicates() if units else pd.DataFrame(index=[0])
    for column in table.columns:
        if column.key and column.name not in units:
            own = levels.get(column.name, _values(column, LEVELS, rng))
            is_own_kind = isinstance(own[0], str) == (column.kind in ("label", "text"))
            column_levels = own if is_own_kind else _values(column, LEVELS, rng)
            rows = rows.merge(pd.DataFrame({column.name: [*column_levels]}), how="cross")
    values = {column.name: _values(column, len(rows), rng) for column in table.columns if not column.key}
    return rows.reset_index(drop=True).assign(**values)[[column.name for column in table.columns]]


def _values(column: Column, count: int, rng: np.random.Generator) -> Sequence[Any]:
    """Values within the range of a column; those of a key differ from each other."""
    if column.kind in ("label", "text"):
        return [f"{column.name} {n}" for n in range(count)]
    if column.kind == "bytes":
        return [bytes([n % 256]) for n in range(count)]
    if column.kind == "flag":
        return rng.random(count) < 0.5
    low = 0 if column.low is None else column.low
    if column.kind == "value":
        high = low + 1 if column.high is None else column.high
        return np.linspace(low, high, count) if column.key else rng.uniform(low, high, count)
    return np.arange(count) + int(low) if column.key else rng.integers(int(low), int(low) + 8, count)
