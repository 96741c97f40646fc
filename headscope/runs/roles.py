"""Roles of heads that follow from their statistics: local, sink, retrieval, ... Probes declare them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pandas as pd

from headscope import plugins


@dataclass(frozen=True)
class Role:
    """A role: its meaning and which rows of the per-head table have it.

    Leading heads have the largest `order_by`, or the smallest if `ascending`.
    """

    meaning: str
    has_role: Callable[[pd.DataFrame], pd.Series]
    order_by: str = ""
    ascending: bool = False


@cache
def roles() -> Mapping[str, Role]:
    """Every declared role by name."""
    return {name: role for _, declared in plugins.load_parts("roles") for name, role in declared.items()}


def heads_with_role(heads: pd.DataFrame, role: str) -> pd.Series:
    """Mask of the rows of the per-head table that have the role; all False if its statistic was not measured."""
    try:
        return roles()[role].has_role(heads).fillna(False).astype(bool)
    except KeyError:
        return pd.Series(False, heads.index)


def leading_heads(heads: pd.DataFrame, role: str, count: int = 3) -> pd.DataFrame:
    """The leading heads of one model that have the role."""
    rows = heads[heads_with_role(heads, role)]
    by = roles()[role].order_by
    ordered = rows.sort_values(by, ascending=roles()[role].ascending, kind="stable") if by in rows else rows
    return ordered.head(count)
