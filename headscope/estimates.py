"""Methods of the values in a per-head table: column <name>_method says whether <name> is exact or an estimate."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

EXACT = "exact"
"""Method of a measured value. Every other method is an estimate."""
ESTIMATE_MARK = "~"
"""Precedes an estimate in tables and charts."""


def method_column(name: str) -> str:
    """The column with the methods of the values in column `name`."""
    return f"{name}_method"


def estimate_mask(heads: pd.DataFrame, name: str) -> pd.Series:
    """Mask of the rows whose value in column `name` is an estimate; all False if the table names no methods."""
    column = method_column(name)
    if column not in heads:
        return pd.Series(False, heads.index)
    return heads[name].notna() & (heads[column] != EXACT)


def mark_of(row: Mapping[Any, Any] | pd.Series, name: str) -> str:
    """`ESTIMATE_MARK` if the value in column `name` of a row is an estimate, else ""."""
    return ESTIMATE_MARK if row.get(method_column(name), EXACT) != EXACT else ""
