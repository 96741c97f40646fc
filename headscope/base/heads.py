"""Head identifiers such as L18H6, and which values of heads are estimates."""

import re
from collections.abc import Iterable, Mapping
from numbers import Number
from operator import index
from typing import Any

import pandas as pd

from headscope.base.user_input import is_too_long, quote
from headscope.errors import BadInput, did_you_mean

HEAD_KEYS = ["model", "layer", "head", "kv_group"]
"""Columns that say which head a row of a per-head table is about; all others are about the head."""

EXACT = "exact"
"""Method of a measured value. Every other method is an estimate."""
ESTIMATE_MARK = "~"
"""Precedes an estimate in tables and charts."""


def check_statistic(heads: pd.DataFrame, name: str) -> None:
    """Raise BadInput unless a per-head table has this column and its values are numbers that describe heads."""
    known = [str(column) for column in heads if column not in HEAD_KEYS and heads[column].dtype.kind in "fiu"]
    if name not in known:
        problem = f"no statistic '{name}' in this run{did_you_mean(name, known)}"
        problem = f"column '{name}' is no statistic of heads" if name in heads else problem
        raise BadInput(f"{problem}. Use a column of run.heads with numbers about heads")


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


Head = tuple[int, int]
"""Layer and query head, both from 0."""
MAX_INDEX = 2**15
"""Numbers of layers and heads are stored in 16 bits."""


def parse_unit(text: Any) -> tuple[int, int, bool]:
    """Parse a head, L18H6, L18.H6, 18.6 or 18-6, or a KV group, 18.g2: (layer, number, whether it is a KV group).

    Raises ValueError for any other text, and for a number: YAML reads 18.10 and 18.1 as the same one.
    """
    if isinstance(text, Number):  # also those of numpy
        raise ValueError(
            f"{quote(text)} is a number, not a head: 1.1 and 1.10 are one number. Write L1H10, in quotes '1.10', or "
            "pairs in a list, [(1, 10)]"
        )
    if text == "all":
        raise ValueError("'all' is not one head. Use it alone, where all heads are a choice, or name heads as in L18H6")
    match = re.fullmatch(r"[lL]?([0-9]{1,5})(?:\.[hH]?|[hH]|-)(g?)([0-9]{1,5})", str(text).strip())
    if match is None:
        raise ValueError(f"{quote(text)} is not a head. Write layer and head as in L18H6 or 18.6")
    return int(match[1]), int(match[3]), bool(match[2])


def parse_head(text: Any) -> Head:
    """Parse a head, L18H6, L18.H6, 18.6 or 18-6. Raises ValueError for a KV group, a number, and any other text."""
    layer, number, is_group = parse_unit(text)
    if is_group:
        raise ValueError(f"'{text}' is a KV group. Name its heads, as in L{layer}H0")
    return layer, number


def to_head(value: Any) -> Head:
    """The head of a name, see `parse_head`, or of a pair (layer, head). Raises ValueError for anything else."""
    if isinstance(value, str | bytes | Number):
        return parse_head(value)
    try:
        layer, head = (number if isinstance(number, bool) else index(number) for number in value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{quote(value)} is not a head. Write L18H6, or a pair of layer and head, (18, 6)") from error
    check_head(layer, head)
    return layer, head


def to_heads(values: Any) -> tuple[Head, ...]:
    """The heads of names and pairs, see `to_head`. Raises ValueError for what holds none, such as one text."""
    try:
        items = None if isinstance(values, str | bytes) or is_too_long(values) else iter(values)
    except TypeError:
        items = None
    if items is None:
        raise ValueError(
            f"{quote(values)} is not a list of heads. Use names such as L18H6,L5H3, or a list of names or pairs "
            "(layer, head)"
        )
    return tuple(map(to_head, items))


def check_head(layer: int, head: int) -> None:
    """Raise ValueError for numbers of a layer and a head that no model has."""
    if not all(0 <= number < MAX_INDEX and not isinstance(number, bool) for number in (layer, head)):
        raise ValueError(f"no model has layer {quote(layer)} and head {quote(head)}")


def check_in_shape(heads: Iterable[Head], shape: tuple[int, int] | None) -> None:
    """Raise ValueError for a head that a model of this shape, its number of layers and of heads, does not have."""
    if shape and (outside := [head for head in heads if head[0] >= shape[0] or head[1] >= shape[1]]):
        raise ValueError(f"{format_head(*outside[0])} is not in shape {[*shape]}. Remove the head, or correct shape")


def format_head(layer: int, head: int) -> str:
    """The identifier of a head, such as L18H6."""
    return f"L{layer}H{head}"


def format_unit(layer: int, number: int, is_group: bool) -> str:
    """The identifier of a head, or of a KV group, such as 18.g2."""
    return f"{layer}.g{number}" if is_group else format_head(layer, number)
