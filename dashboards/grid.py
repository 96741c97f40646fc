"""Which rows the grid of heads shows, and in which order: what AG Grid does in the browser, for what is saved."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from dashboards.view_state import ViewState

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "equals": operator.eq,
    "notEqual": operator.ne,
    "greaterThan": operator.gt,
    "greaterThanOrEqual": operator.ge,
    "lessThan": operator.lt,
    "lessThanOrEqual": operator.le,
}
"""Kinds of AG Grid's number filter that compare with one number."""


def select_rows(heads: pd.DataFrame, view: ViewState) -> pd.DataFrame:
    """The picked heads, all where none is."""
    if not view.selected_heads:
        return heads
    return heads[heads[["layer", "head"]].apply(tuple, axis=1).isin(view.selected_heads)]


def visible_rows(heads: pd.DataFrame, view: ViewState) -> pd.DataFrame:
    """The rows as the grid has them: picked, filtered by column, sorted."""
    rows = select_rows(heads, view)
    for name, asked in view.column_filters.items():
        if name in rows and isinstance(asked, Mapping):
            rows = rows[_filter_mask(rows[name], asked)]
    if view.sort and view.sort[0] in rows:
        rows = rows.sort_values(view.sort[0], ascending=view.sort[1] == "asc", kind="stable")
    return rows


def _filter_mask(values: pd.Series, column_filter: Mapping[str, Any]) -> pd.Series:
    """Which values pass the filter of their column; all where it is none of AG Grid's."""
    if conditions := column_filter.get("conditions"):
        each = np.array([_filter_mask(values, condition) for condition in conditions])
        return pd.Series(each.any(axis=0) if column_filter.get("operator") == "OR" else each.all(axis=0), values.index)
    kind, low, high = str(column_filter.get("type")), column_filter.get("filter"), column_filter.get("filterTo")
    if kind in ("blank", "notBlank"):
        return values.isna() if kind == "blank" else values.notna()
    if kind == "inRange" and isinstance(low, int | float) and isinstance(high, int | float):
        return values.between(low, high, inclusive="neither")
    if kind in COMPARISONS and isinstance(low, int | float):
        passes: pd.Series = COMPARISONS[kind](values, low) & values.notna()
        return passes
    return pd.Series(True, values.index)
