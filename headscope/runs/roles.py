"""What a head is called by what it measures: local, sink, retrieval, ... Probes declare the roles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pandas as pd

from headscope import door


@dataclass(frozen=True)
class Role:
    """A name for heads, and which heads of the per-head table bear it."""

    meaning: str
    holds: Callable[[pd.DataFrame], pd.Series]


@cache
def roles() -> Mapping[str, Role]:
    """Every role that a probe declares, by name."""
    return {name: role for _, declared in door.parts("roles") for name, role in declared.items()}


def holding(heads: pd.DataFrame, role: str) -> pd.Series:
    """Which rows of the per-head table bear the role; none where its statistic was not measured."""
    try:
        return roles()[role].holds(heads).fillna(False).astype(bool)
    except KeyError:
        return pd.Series(False, heads.index)
