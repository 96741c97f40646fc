"""What a head is called by what it measures: local, sink, retrieval, aggregation. The thresholds live here alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pandas as pd

from headscope.summary import longest

LOCAL = 8
"""Effective length, in tokens, below which a head is called local [ours]."""
RETRIEVAL, AGGREGATION = 0.25, 0.75
"""Growth exponents below and above which a head is said to resemble retrieval and aggregation [ours]."""
RETRIEVAL_HEAD = 0.1
"""Mean retrieval score above which a head is called a retrieval head (Wu et al. 2024)."""
SINK = 0.5
"""Weight on the first token above which it is a head's main target [ours]."""


@dataclass(frozen=True)
class Role:
    """A name for heads, and which heads of the wide table bear it."""

    meaning: str
    holds: Callable[[pd.DataFrame], pd.Series]


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "local": Role(f"effective length below {LOCAL} tokens at the longest length", lambda h: h[_ess2(h)] < LOCAL),
        "constant": Role(f"growth exponent below {RETRIEVAL}, as retrieval asks", lambda h: h["growth"] < RETRIEVAL),
        "widening": Role(
            f"growth exponent above {AGGREGATION}, as aggregation asks", lambda h: h["growth"] > AGGREGATION
        ),
        "sink": Role("more than half of the weight on the first token", lambda h: h["sink_mass"] > SINK),
        "retrieval": Role(
            f"retrieval score above {RETRIEVAL_HEAD}, over needles", lambda h: h["retrieval"] > RETRIEVAL_HEAD
        ),
    }
)


def holding(heads: pd.DataFrame, role: str) -> pd.Series:
    """Which rows of the wide table bear the role; none where its statistic was not measured."""
    try:
        return ROLES[role].holds(heads).fillna(False).astype(bool)
    except KeyError:
        return pd.Series(False, heads.index)


def _ess2(heads: pd.DataFrame) -> str:
    return longest(heads) or "ess2"
