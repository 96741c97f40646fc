"""Names of units, and results about them."""

import math
from typing import Any

import pandas as pd

from headscope.effects.sweep import UNIT_KEYS, Effects
from headscope.estimates import ESTIMATE_MARK, EXACT
from headscope.heads import format_head
from headscope.results.result import Result


def unit_nouns(units: pd.DataFrame) -> str:
    """What the units of a table are, in the plural: "heads", "KV groups", or both."""
    is_group = units["head"] < 0
    return "KV groups" if is_group.all() else "heads and KV groups" if is_group.any() else "heads"


def unit_name(unit: pd.Series) -> str:
    """The name of a head or KV group, such as L3H1 or "L3 KV group 0"."""
    if unit["head"] >= 0:
        return format_head(int(unit["layer"]), int(unit["head"]))
    return f"L{int(unit['layer'])} KV group {int(unit['kv_group'])}"


def units_of_head(units: pd.DataFrame, layer: int, head: int, kv_group: int) -> pd.DataFrame:
    """The unit that is or contains a query head, as one row; no row if the sweep lacks it."""
    is_unit = (units["layer"] == layer) & (units["kv_group"] == kv_group) & units["head"].isin([-1, head])
    return units[is_unit]


def estimate_marks(effects: Effects) -> list[str] | None:
    """`ESTIMATE_MARK` for each unit that was only estimated, "" for others; None if all or none were measured."""
    is_exact = effects.is_exact
    if is_exact.all() or not is_exact.any():
        return None
    return ["" if exact else ESTIMATE_MARK for exact in is_exact]


def unit_fields(unit: pd.Series) -> dict[str, Any]:
    """The fields of a result that say which head or KV group it belongs to."""
    name = "head" if unit["head"] >= 0 else "kv_group"
    return {"layer": int(unit["layer"]), name: int(unit[name])}


def unit_result(effects: Effects, unit: pd.Series, question: str, **fields: Any) -> Result:
    """The effect of one unit (a row of `units`, or of `ranking.largest_unit`) as a result.

    `fields` are further fields of the result. The head is set if the unit is a head or KV group.
    """
    place = unit_fields(unit) if effects.sweep.units == UNIT_KEYS else {}
    values: dict[str, Any] = {
        "model": effects.model,
        "where": effects.where,
        "value": float(unit["effect"]),
        "low": float(unit["low"]),
        "high": float(unit["high"]),
        "n": int(unit["n"]),
        "is_exact": unit["method"] == EXACT,
        "p_adjusted": float(unit.get("p_adjusted", math.nan)),
        "selected_from": int(unit.get("selected_from", 1)),
        "by_sample": effects.by_sample(unit),
    }
    return Result(question=question, **(values | place | fields))
