"""Text of findings, tables and tokens that several probes share."""

import math
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from headscope.base.heads import ESTIMATE_MARK, estimate_mask, mark_of
from headscope.rendering.blocks import TextTable
from headscope.results.ranks import head_ranks
from headscope.results.words import count_nouns, headline, percent
from headscope.runs.column_metadata import ENDINGS, format_number, is_statistic, statistic
from headscope.runs.run import Run

WINDOWED = "sliding-window"
"""Name of the layers whose window is shorter than the context."""
SINK_ROWS = "in the rows that see it"
"""The rows over which the weight of windowed heads on the first token is averaged."""
format_percent = percent
CONTROL_SYMBOLS = {"\r": "", "\n": "⏎", "\t": "⇥"}
INVISIBLE_JOINERS = "\u200c\u200d"
"""Invisible characters that are part of letters and emoji."""


def describe_extremes(heads: pd.DataFrame, statistic_name: str, model: str) -> str:
    """A sentence with the lowest head, the highest head and the median of a model; "" without values."""
    rows = heads[(heads["model"] == model) & heads[statistic_name].notna()]
    if rows.empty:
        return ""
    ordered = rows.sort_values(statistic_name)
    ends = [
        f"{mark_of(row, statistic_name)}{format_number(row[statistic_name])} ({head_name(row)})"
        for row in (ordered.iloc[0], ordered.iloc[-1])
    ]
    estimated = int(estimate_mask(rows, statistic_name).sum())
    note = f" {ESTIMATE_MARK}: {estimated} of {len(rows)} heads are estimated." if estimated else ""
    return f"From {ends[0]} to {ends[1]}; median {format_number(rows[statistic_name].median())}.{note}"


def heads_by_model(heads: pd.DataFrame, statistic_name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Label and heads of each model with the statistic; heads without a value are left out."""
    if statistic_name in heads:
        for label, rows in heads.dropna(subset=[statistic_name]).groupby("model", observed=True):
            yield str(label), rows


def layer_windows(run: Run, label: str) -> dict[int, int | None]:
    """The sliding window of every layer of a model by layer number, None without one."""
    geometry = next(model["geometry"] for model in run.manifest["models"] if model["label"] == label)
    return dict(zip(geometry["numbers"], geometry["windows"], strict=True))


def heads_by_window(run: Run, rows: pd.DataFrame, length: int | None) -> list[tuple[dict[str, str], pd.DataFrame]]:
    """Split the heads of one model into those that see a whole context of `length` tokens and those with a window.

    Without a length every window counts. Each part has the condition `layers` for its results: "global" or
    "sliding-window"; none if no layer has a window.
    """
    (label,) = rows["model"].unique()
    windows = layer_windows(run, label)
    is_short = {
        number: window is not None and (length is None or window < length) for number, window in windows.items()
    }
    is_windowed = rows["layer"].map(is_short)
    if not is_windowed.any():
        return [({}, rows)]
    parts = {"global": rows[~is_windowed], WINDOWED: rows[is_windowed]}
    return [({"layers": layers}, part) for layers, part in parts.items() if len(part)]


def format_head_count(mask: pd.Series) -> str:
    """The number of True heads and of all heads: "3 of 270 heads"."""
    return f"{int(mask.sum())} of {count_nouns(len(mask), 'heads')}"


def head_name(row: pd.Series) -> str:
    """The name of a head in a sentence: "layer 3, head 2"."""
    return f"layer {row['layer']}, head {row['head']}"


def head_mask(heads: pd.DataFrame, layer: int, head: int) -> pd.Series:
    """Mask of the rows of one head."""
    return (heads["layer"] == layer) & (heads["head"] == head)


def describe_ranks(run: Run, statistic_name: str, layer: int, head: int, models: Collection[str] | None = None) -> str:
    """The rank of a head by a statistic in each model, highest first: "2 of 270 in base (0.91)"; "" without values."""
    return ", ".join(
        headline(part) for ranks in head_ranks(run, statistic_name, layer, head, models) for part in ranks.parts
    )


def statistics_table(caption: str, frame: pd.DataFrame) -> TextTable:
    """The frame as a text table, each interval in brackets after its value."""
    names = value_columns(frame)
    rows = [[format_cell(row, name) for name in names] for row in frame.to_dict("records")]
    return TextTable(caption, [column_heading(name) for name in names], rows)


def explain_columns(column_names: Iterable[str]) -> list[str]:
    """A line for each statistic among the columns that readers may not know: "CoV of pairs: coefficient of ..."."""
    known = [statistic(name) for name in column_names if is_statistic(name)]
    return [f"{entry.title}: {entry.explanation}." for entry in known if entry.explanation]


def value_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that are neither an end of an interval nor the methods of another column."""
    others = {f"{name}_{ending}" for name in frame for ending in ENDINGS}
    return [name for name in map(str, frame) if name not in others]


def column_heading(column_name: str) -> str:
    """The label of the statistic with its unit, or else the column name without underscores."""
    return statistic(column_name).label_with_unit if is_statistic(column_name) else column_name.replace("_", " ")


def format_cell(row: Mapping[Any, Any], column_name: str) -> str:
    """The value in the column as text, marked if it is an estimate, else with its interval in brackets, if any."""
    value = row[column_name]
    if not isinstance(value, float):
        return str(value)
    to_text = statistic(column_name).format_number if is_statistic(column_name) else format_number
    low, high = row.get(f"{column_name}_low", math.nan), row.get(f"{column_name}_high", math.nan)
    if math.isnan(low) or low == high:
        return f"{mark_of(row, column_name)}{to_text(value)}"
    return f"{to_text(value)} ({to_text(low)} to {to_text(high)})"


def to_visible_line(text: str) -> str:
    """Text on one line, with symbols for invisible characters."""
    return "".join(CONTROL_SYMBOLS.get(character, _visible_character(character)) for character in text)


def to_visible_token(token_text: str) -> str:
    """A token as visible text: a combining mark gets a dotted circle, an empty token is a box."""
    if not token_text:
        return "▯"
    return f"◌{token_text}" if unicodedata.category(token_text[0]).startswith("M") else token_text


def _visible_character(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in INVISIBLE_JOINERS else "\ufffd"
