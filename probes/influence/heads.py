"""Columns of the influence probe in the per-head table.

The most accurate method of each unit counts. Every head of a KV group has the influence of the group.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd

from headscope.runs.aggregation import (
    HEAD_KEYS,
    group_members,
    mean_with_interval,
    plain_types,
    rows_at_longest_length,
    with_method,
)
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.influence.bands import band_mask
from probes.influence.effect_rows import METHODS_BY_ACCURACY, add_damped_estimates, read_unit_rows, with_objective
from probes.influence.schema import SWEEP_KEYS, UNIT_COLUMNS

COMPONENT_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "joint": "frequencies and temperature",
        "freq": "frequencies",
        "scale": "temperature",
        "zero": "zero ablation",
        "mean": "mean ablation",
        "uniform": "uniform attention",
        "kv-int8": "8-bit keys and values",
        "kv-int4": "4-bit keys and values",
    }
)
"""Text for each component; a user's own intervention has its name."""

_COLUMN_PREFIXES = {"text": "", "answer": "answer_"}
_UNIT_NOTE = "of the head, or of its KV group if that was measured"
_RESET_LABELS = {"joint": "influence", "freq": "influence of frequencies", "scale": "influence of temperature"}
_RESET_PARAMETERS = {"joint": "frequencies and temperature", "freq": "frequencies", "scale": "tau and gamma"}
_CONDITIONS = {
    name: f"when {_RESET_PARAMETERS[name]} {_UNIT_NOTE}, are reset"
    if name in _RESET_PARAMETERS
    else f"under {words} {_UNIT_NOTE}"
    for name, words in COMPONENT_DESCRIPTIONS.items()
}
"""What is changed, by component."""
_RESET_TARGET = "; to the start of training where measured, else to the checkpoint's own parameters"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"influence_{name}": Statistic(
            _RESET_LABELS.get(name, f"influence, {words}"),
            "nats/token",
            f"rise of the loss {_CONDITIONS[name]}{_RESET_TARGET if name in _RESET_PARAMETERS else ''}",
            number_format="+.2g",
        )
        for name, words in COMPONENT_DESCRIPTIONS.items()
    }
    | {
        f"influence_answer_{name}": Statistic(
            f"influence on answers, {words}",
            "nats/token",
            f"rise of the loss of the answer about a hidden fact {_CONDITIONS[name]}; mean over trials",
            number_format="+.2g",
        )
        for name, words in COMPONENT_DESCRIPTIONS.items()
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by (model, layer, head, kv_group): `influence_<component>` at the longest length and, over all trials,
    `influence_answer_<component>`, each with its confidence interval and method. Estimates have no interval, and bands
    of pairs no columns."""
    unit_rows = read_unit_rows(run)
    if unit_rows is None:
        return None
    without_bands = unit_rows[~band_mask(unit_rows["component"])]
    if without_bands.empty:
        return None
    frame = best_method_rows(without_bands)
    order = frame["target"].map({"init": 0, "base": 1}).fillna(0)
    sweep = [frame[name] for name in ("model", "component", "objective")]
    frame = frame[order == order.groupby(sweep).transform("min")]
    rows = frame.merge(group_members(run.manifest["models"]), on=["model", "layer", "kv_group"])
    rows = rows[(rows["head"] < 0) | (rows["head"] == rows["member"])].assign(head=lambda f: f["member"])
    groups: Any = rows.groupby(["objective", "component"], sort=False)
    return pd.concat(
        [
            with_method(
                mean_with_interval(
                    block.set_index([*HEAD_KEYS, "doc"])["delta_nll"],
                    f"influence_{_COLUMN_PREFIXES[objective]}{component}",
                ),
                block.set_index(HEAD_KEYS)["method"],
            )
            for (objective, component), block in groups
        ],
        axis=1,
    )


def best_method_rows(influence: pd.DataFrame) -> pd.DataFrame:
    """Rows at each model's longest length, each unit by its most accurate method: exact if evaluated, else the damped
    estimate of highest order."""
    frame = add_damped_estimates(rows_at_longest_length(with_objective(plain_types(influence)), ["model", "objective"]))
    rank = frame["method"].map(METHODS_BY_ACCURACY.index)
    unit = [frame[name] for name in [*SWEEP_KEYS, *UNIT_COLUMNS]]
    return frame[rank == rank.groupby(unit).transform("min")]
