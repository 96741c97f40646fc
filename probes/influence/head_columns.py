"""Columns of the influence probe in the per-head table.

The most accurate method of each unit counts. Every head of a KV group has the influence of the group.
"""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from headscope.ablation_names import MEAN_OF_DOCUMENT, MEAN_OF_TEXT, column_part, describe_ablation
from headscope.effects.sweep import best_method_rows
from headscope.effects.units import head_columns
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.influence.bands import band_mask
from probes.influence.effect_rows import SWEEP, longest_rows, read_unit_rows

COMPONENT_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "joint": "frequencies and temperature",
        "freq": "frequencies",
        "scale": "temperature",
        "zero": "zero ablation",
        MEAN_OF_TEXT: describe_ablation(MEAN_OF_TEXT),
        MEAN_OF_DOCUMENT: describe_ablation(MEAN_OF_DOCUMENT),
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
        f"influence_{column_part(name)}": Statistic(
            _RESET_LABELS.get(name, f"influence, {words}"),
            "nats/token",
            f"rise of the loss {_CONDITIONS[name]}{_RESET_TARGET if name in _RESET_PARAMETERS else ''}",
            number_format="+.2g",
        )
        for name, words in COMPONENT_DESCRIPTIONS.items()
    }
    | {
        f"influence_answer_{column_part(name)}": Statistic(
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
    rows = longest_rows(unit_rows[~band_mask(unit_rows["component"])])
    if rows.empty:
        return None
    order = rows["target"].map({"init": 0, "base": 1}).fillna(0)
    of_model = [rows[name] for name in ("model", "intervention", "objective")]
    rows = best_method_rows(rows[order == order.groupby(of_model).transform("min")], SWEEP)
    columns = "influence_" + rows["objective"].map(_COLUMN_PREFIXES) + rows["intervention"].map(column_part)
    return head_columns(run, rows.assign(column=columns), SWEEP)
