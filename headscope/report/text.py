"""Small wordings that every probe's charts and findings share."""

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.report.blocks import TextTable
from headscope.runs.column_metadata import column, is_statistic, number, statistic
from headscope.runs.run import Run
from headscope.runs.training_runs import courses, without_steps_before

MAX_TRAININGS = 10
"""Trainings that are shown beside each other."""
CONTROL_SYMBOLS = {"\r": "", "\n": "⏎", "\t": "⇥"}
INVISIBLE_JOINERS = "\u200c\u200d"
"""Invisible characters that belong to the letters and pictures around them."""


def evenly_spaced(labels: Sequence[str], max_count: int = 6) -> list[str]:
    """At most `most` of the labels, the first and the last among them, evenly spaced."""
    at = np.unique(np.linspace(0, len(labels) - 1, min(max_count, len(labels))).round().astype(int))
    return [labels[i] for i in at]


def default_models(run: Run) -> list[str]:
    """The models that are shown where nobody chose: few, and of several trainings only the last of each."""
    models = run.manifest["models"]
    several = courses(models)["training"].nunique() > 1
    return evenly_spaced(without_steps_before(models), MAX_TRAININGS) if several else evenly_spaced(run.models)


def default_models_with(run: Run, model: str) -> list[str]:
    """The model in view and those that are shown beside it, in the order of the run."""
    shown = {*default_models(run), model}
    return [label for label in run.models if label in shown]


def describe_extremes(heads: pd.DataFrame, statistic_name: str, model: str) -> str:
    """The lowest and highest heads of a model in words, with the median."""
    block = heads[(heads["model"] == model) & heads[statistic_name].notna()]
    if block.empty:
        return ""
    order = block.sort_values(statistic_name)
    low, high = order.iloc[0], order.iloc[-1]
    return (
        f"From {number(low[statistic_name])} ({head_name(low)}) to {number(high[statistic_name])} ({head_name(high)}); median "
        f"{number(block[statistic_name].median())}."
    )


def heads_by_model(heads: pd.DataFrame, statistic_name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Label and heads of each model that has the statistic, those heads that lack it left out."""
    if statistic_name in heads:
        for label, block in heads.dropna(subset=[statistic_name]).groupby("model", observed=True):
            yield str(label), block


def format_head_count(mask: pd.Series) -> str:
    """How many heads of how many."""
    return f"{int(mask.sum())} of {len(mask)} heads"


def join_words(words: Sequence[str]) -> str:
    """One, two and three."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def head_name(row: pd.Series) -> str:
    """What the head of a row is called in a sentence."""
    return f"layer {row['layer']}, head {row['head']}"


def head_mask(heads: pd.DataFrame, layer: int, head: int) -> pd.Series:
    """Which rows are that head's."""
    return (heads["layer"] == layer) & (heads["head"] == head)


def describe_ranks(heads: pd.DataFrame, statistic_name: str, layer: int, head: int) -> str:
    """The rank of a head by a statistic among the heads of each model, the highest first, in words; "" without any."""
    told = []
    for label, block in heads_by_model(heads, statistic_name):
        values = block.set_index(["layer", "head"])[statistic_name]
        if (layer, head) in values.index:
            value = float(values.loc[(layer, head)])
            told.append(f"{int((values > value).sum()) + 1} of {len(values)} in {label} ({number(value)})")
    return ", ".join(told)


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


def to_visible_line(text: str) -> str:
    """Text on one line, and what is not to be seen as a sign."""
    return "".join(CONTROL_SYMBOLS.get(character, _visible_character(character)) for character in text)


def to_visible_token(token_text: str) -> str:
    """A token as something to see and to click: a mark without its letter on a circle, nothing as a box."""
    if not token_text:
        return "▯"
    return f"◌{token_text}" if unicodedata.category(token_text[0]).startswith("M") else token_text


def _visible_character(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in INVISIBLE_JOINERS else "\ufffd"
