"""Details of results that several questions of the influence probe share, and the concentration of a sweep."""

import math

import pandas as pd

from headscope.effects.ranking import rank
from headscope.effects.statistics import TOP_FRACTION, gini, top_share, top_share_interval, top_unit_count
from headscope.effects.sweep import Effects
from headscope.effects.units import unit_nouns
from headscope.results.result import Result
from headscope.runs.column_metadata import statistic
from probes.influence.labels import describe_change, unit_noun


def sweep_details(effects: Effects) -> dict[str, str]:
    """What names a sweep and its units in sentences besides its keys."""
    change = describe_change(effects.key["intervention"], effects.key["target"])
    return {"change": change, "noun": unit_noun(effects.units), "nouns": unit_nouns(effects.units)}


def rank_details(effects: Effects, unit: pd.Series) -> dict[str, int | None]:
    """The rank of a unit by influence, from 1 for the largest rise of the loss, and the number of units.

    The only unit has no rank.
    """
    units = len(effects.units)
    return {"rank": rank(effects.units["effect"], unit["effect"]) if units > 1 else None, "units": units}


def top_head_details(column: str, unit: pd.Series) -> dict[str, str]:
    """The name of the top head of a statistic, and that its KV group is changed with it."""
    return {"top_head": statistic(column).best_head_name, "group_of": "the KV group of" if unit["head"] < 0 else ""}


def concentration(effects: Effects, question: str) -> Result:
    """How much of the total rise of the loss the top units contribute. An interval needs exact effects."""
    is_exact = bool(effects.is_exact.all())
    low, high = top_share_interval(effects.values) if is_exact else (math.nan, math.nan)
    details = {
        **sweep_details(effects),
        "fraction": TOP_FRACTION,
        "top": top_unit_count(len(effects.units)),
        "units": len(effects.units),
        "gini": gini(effects.units["effect"]),
        "estimated": int((~effects.is_exact).sum()) or None,
    }
    return Result(
        question=question,
        value=top_share(effects.units["effect"]),
        low=low,
        high=high,
        n=effects.values.shape[1],
        model=effects.model,
        is_exact=is_exact,
        where=effects.where,
        details=details,
    )
