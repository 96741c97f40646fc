"""Columns and cells of a table of statistics, in words: what report, terminal and app write alike."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from headscope.report.blocks import TextTable
from headscope.runs.column_metadata import column, is_statistic, number, statistic


def statistics_table(caption: str, frame: pd.DataFrame) -> TextTable:
    """The frame in words, ends of intervals folded into their value."""
    names = value_columns(frame)
    rows = [[format_cell(row, name) for name in names] for row in frame.to_dict("records")]
    return TextTable(caption, [column_heading(name) for name in names], rows)


def value_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that are no end of an interval."""
    return [name for name in map(str, frame) if not column(name).end]


def column_heading(column_name: str) -> str:
    """The statistic with its unit, or the column's own name."""
    return statistic(column_name).worded if is_statistic(column_name) else column_name.replace("_", " ")


def format_cell(row: Mapping[Any, Any], column_name: str) -> str:
    """The value in that column, with its interval in brackets where it has one."""
    value = row[column_name]
    if not isinstance(value, float):
        return str(value)
    shown = statistic(column_name).number if is_statistic(column_name) else number
    low, high = row.get(f"{column_name}_low", math.nan), row.get(f"{column_name}_high", math.nan)
    return shown(value) if math.isnan(low) or low == high else f"{shown(value)} ({shown(low)} to {shown(high)})"
