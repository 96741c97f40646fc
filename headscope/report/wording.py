"""Columns and cells of a table of statistics, in words: what report, terminal and app write alike."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from headscope.report.content import Listing
from headscope.runs.statistics import column, is_statistic, number, statistic


def table(caption: str, frame: pd.DataFrame) -> Listing:
    """The frame in words, ends of intervals folded into their value."""
    names = values(frame)
    rows = [[cell(row, name) for name in names] for row in frame.to_dict("records")]
    return Listing(caption, [heading(name) for name in names], rows)


def values(frame: pd.DataFrame) -> list[str]:
    """The columns that are no end of an interval."""
    return [name for name in map(str, frame) if not column(name).end]


def heading(name: str) -> str:
    """The statistic with its unit, or the column's own name."""
    return statistic(name).worded if is_statistic(name) else name.replace("_", " ")


def cell(row: Mapping[Any, Any], name: str) -> str:
    """The value in that column, with its interval in brackets where it has one."""
    value = row[name]
    if not isinstance(value, float):
        return str(value)
    shown = statistic(name).number if is_statistic(name) else number
    low, high = row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    return shown(value) if math.isnan(low) or low == high else f"{shown(value)} ({shown(low)} to {shown(high)})"
