"""Text about orders, windows and intervals in plots, tables and findings of the budget probe."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.aggregation import MIN_DOCUMENTS
from headscope.runs.column_metadata import is_statistic, statistic
from probes.budget.schema import EVERY_ORDER, RANDOM

ORDER_LABELS = {
    "effective-length": "effective length",
    "local-mass": "local mass",
    "far-mass": "far mass",
    RANDOM: "random order",
    EVERY_ORDER: "every order",
}
GIB, MIB = 2**30, 2**20


def order_label(order: str) -> str:
    """The name of an order in text: of a column of a run, the label of its statistic."""
    if order in ORDER_LABELS:
        return ORDER_LABELS[order]
    column = order.removeprefix("-")
    label = statistic(column).label if is_statistic(column) else column
    return f"{label}, highest first" if column != order else label


def describe_window(settings: pd.Series) -> str:
    """The tokens that a streaming KV group keeps: "the first 64 and last 256 tokens"."""
    return f"the first {int(settings['sink']):,} and last {int(settings['recent']):,} tokens"


def format_interval(row: Any, name: str, format_value: Callable[[float], str]) -> str:
    """The 95 % confidence interval of a column, to follow its value, or why there is none."""
    low, high = float(row[f"{name}_low"]), float(row[f"{name}_high"])
    if np.isnan(low):
        return f" (n = {int(row['n'])}, too few documents for an interval; {MIN_DOCUMENTS} are needed)"
    if low == high:
        return f" (the same measured value in all {int(row['n'])} documents)"
    return f" (95 % confidence interval {format_value(low)} to {format_value(high)}, n = {int(row['n'])})"


def format_bytes(size: float) -> str:
    """A size in MiB, or in GiB from 1 GiB on."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"
