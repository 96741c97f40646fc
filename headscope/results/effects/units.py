"""Units of a sweep: their names, results about them, and columns of the per-head table."""

import math
from typing import Any

import pandas as pd

from headscope.base.heads import ESTIMATE_MARK, EXACT, format_head
from headscope.results.effects.sweep import UNIT_KEYS, Effects, Sweep
from headscope.results.result import Result
from headscope.runs.aggregation import HEAD_KEYS, group_members, mean_with_interval, with_method
from headscope.runs.run_tables import RunTables


def unit_nouns(units: pd.DataFrame) -> str:
    """What the units of a table are, in the plural: "heads", "KV groups", or both."""
    is_group = units["head"] < 0
    return "KV groups" if is_group.all() else "heads and KV groups" if is_group.any() else "heads"


def unit_name(unit: pd.Series) -> str:
    """The name of a head or KV group, such as L3H1, L3H1@last for one at some positions, or "L3 KV group 0"."""
    if unit["head"] >= 0:
        place = unit.get("positions", "all")
        return format_head(int(unit["layer"]), int(unit["head"])) + ("" if place == "all" else f"@{place}")
    return f"L{int(unit['layer'])} KV group {int(unit['kv_group'])}"


def units_of_head(effects: Effects, layer: int, head: int, kv_group: int) -> list[pd.Series]:
    """The units that are or contain a query head: usually one; none if the sweep lacks it."""
    positions = (effects.unit_positions.get((layer, kv_group, unit_head)) for unit_head in (-1, head))
    return [effects.units.iloc[position] for position in positions if position is not None]


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
    place = unit_fields(unit) if {*UNIT_KEYS} <= {*effects.sweep.units} else {}
    details = dict(fields.pop("details", {}))
    if unit["n"] > 1 and "mean_of_ratios" in unit:
        details["mean_of_ratios"] = float(unit["mean_of_ratios"])
    values: dict[str, Any] = {
        "details": details,
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


def head_columns(run: RunTables, rows: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """One column for each value of `column` by (model, layer, head, kv_group): the mean over samples with its interval
    and, if the sweep has estimates, its method: exact; that of the estimates, which has no interval; or mixed.

    `rows` have one method per unit (`best_method_rows`), and `doc`, which names the sample of the mean. Every head of a
    KV group has the effect of the group.
    """
    rows = rows.merge(group_members(run.manifest["models"]), on=["model", "layer", "kv_group"])
    rows = rows[(rows["head"] < 0) | (rows["head"] == rows["member"])].assign(head=lambda frame: frame["member"])
    groups: Any = rows.groupby("column", sort=False)
    blocks = []
    for name, block in groups:
        of_samples = block.set_index([*HEAD_KEYS, "doc"])
        weights = None
        if sweep.weight:  # relative to those of the set, so that a set of large differences does not dominate others
            by_set = of_samples.groupby([*sweep.keys])[sweep.weight]
            weights = of_samples[sweep.weight] / by_set.transform("mean")
        means = mean_with_interval(of_samples[sweep.value], str(name), weights=weights)
        has_estimates = len(sweep.methods) > 1
        blocks.append(with_method(means, block.set_index(HEAD_KEYS)["method"]) if has_estimates else means)
    return pd.concat(blocks, axis=1)
