"""What a head is called by what it measures: local, sink, retrieval, ... Probes declare the roles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pandas as pd

from headscope import plugins


@dataclass(frozen=True)
class Role:
    """A name for heads, and which heads of the per-head table bear it; those of the largest `by` lead, or of the
    smallest where `least` says so."""

    meaning: str
    has_role: Callable[[pd.DataFrame], pd.Series]
    order_by: str = ""
    ascending: bool = False


@cache
def roles() -> Mapping[str, Role]:
    """Every role that a probe declares, by name."""
    return {name: role for _, declared in plugins.load_parts("roles") for name, role in declared.items()}


def heads_with_role(heads: pd.DataFrame, role: str) -> pd.Series:
    """Which rows of the per-head table bear the role; none where its statistic was not measured."""
    try:
        return roles()[role].has_role(heads).fillna(False).astype(bool)
    except KeyError:
        return pd.Series(False, heads.index)


def leading_heads(heads: pd.DataFrame, role: str, count: int = 3) -> pd.DataFrame:
    """The heads of one model that bear the role and lead in it."""
    bearing = heads[heads_with_role(heads, role)]
    by = roles()[role].order_by
    ordered = bearing.sort_values(by, ascending=roles()[role].ascending, kind="stable") if by in bearing else bearing
    return ordered.head(count)
