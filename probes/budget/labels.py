"""Text about orders and windows in plots, tables and results of the budget probe."""

import pandas as pd

from headscope.runs.column_metadata import is_statistic, statistic
from probes.budget.schema import EVERY_ORDER, RANDOM

ORDER_LABELS = {
    "effective-length": "effective length",
    "local-mass": "local mass",
    "far-mass": "far mass",
    RANDOM: "random order",
    EVERY_ORDER: "every order",
}


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
