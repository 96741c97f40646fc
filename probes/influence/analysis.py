"""Analysis of influence: effects of every unit in each sweep, of sets of units, and of bands of rotary pairs.

Every difference is paired: both losses are those of one document.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.ablation_names import MEAN_OF_DOCUMENT, MEAN_OF_TEXT, column_part, describe_ablation
from headscope.base.heads import EXACT
from headscope.results.effects.sweep import (
    UNIT_KEYS,
    Effects,
    Sweep,
    best_method_rows,
    effects_table,
    rows_of_sweep,
    sweep_effects,
)
from headscope.results.effects.units import head_columns, units_of_head
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic, exceeds, statistics
from headscope.runs.run_tables import RunTables
from probes.influence import bands
from probes.influence.bands import band_mask
from probes.influence.declaration import NAMED_SET_PREFIX, SET_TABLES, UNIT_TABLES

TEXT_NOUNS = {"text": "document", "answer": "trial"}
"""Noun for one text, by objective."""
SATURATION_FACTOR = 2.0
"""Saturation of the second-order term, in mean absolute first-order estimates of the text's sweep [ours]."""
ESTIMATE_KEYS = ["model", "context_length", "doc", "fact", "depth", "component", "target", "layer", "kv_group", "head"]
SWEEP = Sweep(
    keys=("model", "context_length", "intervention", "target", "objective"),
    sample="doc",
    value="delta_nll",
    methods=("exact", "damped", "second-order", "estimate"),
)
"""One change of every unit of a model. The intervention is the component in the tables."""


def with_objective(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `objective`. For answers, `doc` names the trial and `context_length` is the longest of the
    model's grid, because the grid is one sweep."""
    if "objective" in rows:
        return rows
    if "fact" not in rows:
        return rows.assign(objective="text")
    rows = plain_types(rows)
    trial = ["doc", "fact", "depth", "context_length"]
    trials = rows[trial].drop_duplicates()
    trials["trial"] = [
        f"{doc}, {fact} at {100 * depth:.0f} % of {length:,} tokens"
        for doc, fact, depth, length in trials.itertuples(index=False)
    ]
    names = rows.merge(trials, on=trial, how="left")["trial"].to_numpy()
    longest = rows.groupby("model")["context_length"].transform("max")
    return rows.assign(objective="answer", doc=names, context_length=longest).drop(columns=["fact", "depth"])


def read_unit_rows(run: RunTables) -> pd.DataFrame | None:
    """The run's rows of single units, of both objectives; None if there are none."""
    return _read_tables(run, UNIT_TABLES.values())


def read_set_rows(run: RunTables) -> pd.DataFrame | None:
    """The run's rows of sets of units, of both objectives; None if there are none."""
    return _read_tables(run, SET_TABLES.values())


def _read_tables(run: RunTables, table_names: Iterable[str]) -> pd.DataFrame | None:
    blocks = [with_objective(run.table(name)) for name in table_names if name in run.tables]
    if len(blocks) < 2:
        return blocks[0] if blocks else None
    return pd.concat(map(plain_types, blocks), ignore_index=True)


def longest_rows(influence: pd.DataFrame) -> pd.DataFrame:
    """The rows of `SWEEP` at the longest length of each model and objective, with damped estimates."""
    rows = rows_at_longest_length(with_objective(plain_types(influence)), ["model", "objective"])
    return add_damped_estimates(rows).rename(columns={"component": "intervention"})


def add_damped_estimates(influence: pd.DataFrame) -> pd.DataFrame:
    """The rows, plus one of method `damped` for every unit and text that has both `estimate` and `second-order`.

    first + added / (1 + |added| / scale), in nats/token, with first = estimate, added = second-order - estimate and
    scale twice the mean |first| over the units of the text's sweep. The table may lack some of the keys.
    """
    unit = [name for name in ESTIMATE_KEYS if name in influence]
    rows = influence.astype({"method": "str", "delta_nll": "float64"})
    first, second = (rows[rows["method"] == method].set_index(unit) for method in ("estimate", "second-order"))
    added = (second["delta_nll"] - first["delta_nll"]).dropna()
    if added.empty:
        return rows
    base = first.loc[added.index]
    sweep = [name for name in unit if name not in ("layer", "kv_group", "head")]
    scale = SATURATION_FACTOR * base["delta_nll"].abs().groupby(level=sweep, observed=True).transform("mean")
    size = (added.abs() / scale).fillna(0)  # 0 / 0 if the whole sweep has no effect
    damped = base.assign(method="damped", delta_nll=base["delta_nll"] + added / (1 + size))
    return pd.concat([rows, damped.reset_index()], ignore_index=True)


ANSWERED_THRESHOLD = 0.5
"""A trial counts as answered if more than this share of the answer's tokens is the model's top prediction [ours]."""
SET_SWEEP = replace(SWEEP, units=("unit", "choice", "size"), methods=(EXACT,))
"""Sets of units, each of one kind of unit, choice and size, over documents; draws are averaged."""
BandKey = tuple[str, int, str]
"""Model, context length and objective."""


def unit_sweeps(influence: pd.DataFrame, models: Iterable[str]) -> list[Effects]:
    """Every sweep at the longest context length of each model and objective, from rows of single units."""
    return sweep_effects(longest_rows(influence), SWEEP, [*models])


def all_sweeps(run: RunTables) -> list[Effects]:
    """All sweeps of a run."""
    rows = read_unit_rows(run)
    return [] if rows is None else unit_sweeps(rows, run.models)


def sweeps_without_bands(run: RunTables) -> list[Effects]:
    """All sweeps of a run except those of bands of rotary pairs."""
    return [effects for effects in run.derived(all_sweeps) if not bands.is_band(effects.key["intervention"])]


def band_sweeps(run: RunTables) -> dict[BandKey, list[Effects]]:
    """Sweeps of bands of rotary pairs, one per band, by model, context length and objective."""
    sweeps: dict[BandKey, list[Effects]] = {}
    for effects in run.derived(all_sweeps):
        if bands.is_band(effects.key["intervention"]):
            key = effects.model, effects.key["context_length"], effects.key["objective"]
            sweeps.setdefault(key, []).append(effects)
    return sweeps


def band_wavelengths(run: RunTables, label: str, components: Iterable[str]) -> dict[str, str]:
    """Text with the wavelengths (tokens) of a model's rotary pairs in each band of pair numbers, by the band's label.

    Wavelengths are those of the base RoPE. Empty without stored positions.
    """
    if "positions" not in run.tables:
        return {}
    pairs = rows_at_longest_length(run.table("positions"))
    pairs = pairs[(pairs["model"] == label) & np.isfinite(pairs["log_theta_base"])]
    wavelengths = 2 * np.pi * np.exp(-pairs["log_theta_base"].astype("float64"))
    by_pair = wavelengths.groupby(pairs["pair"]).agg(["min", "max"])
    ranges: dict[str, str] = {}
    for band in dict.fromkeys(map(bands.band_label, components)):
        if band not in bands.WAVELENGTH_BANDS:
            in_band = by_pair.loc[slice(*map(int, band.split("-")))]
            if len(in_band):
                ranges[band] = f"{in_band['min'].min():,.0f} to {in_band['max'].max():,.0f} tokens"
    return ranges


def top_heads_by_statistic(heads: pd.DataFrame) -> dict[str, pd.Series]:
    """The top head of one model for every statistic whose top head has a name, by the statistic's column.

    `heads` are the model's rows of the per-head table. Statistics without values are left out.
    """
    best_head_columns = [name for name, statistic in statistics().items() if statistic.best_head_name and name in heads]
    measured = (name for name in best_head_columns if heads[name].notna().any())
    return {name: heads.iloc[int(heads[name].fillna(-np.inf).argmax())] for name in measured}


def unit_of_head(effects: Effects, head: pd.Series) -> list[pd.Series]:
    """The unit that is or contains a head (a row of the per-head table); none if the sweep lacks it."""
    return units_of_head(effects, head["layer"], head["head"], head["kv_group"])


def covers_all_units(units: pd.DataFrame, heads: pd.DataFrame) -> bool:
    """Whether a sweep covers every unit of its model, not only the heads of named sets. `heads` are the model's."""
    unit_columns = [*UNIT_KEYS[:2]] if (units["head"] < 0).all() else ["layer", "head"]
    return len(units) >= len(heads[unit_columns].drop_duplicates())


def answered_trials(run: RunTables) -> dict[str, tuple[int, int, list[Effects]]]:
    """Number of trials that the unchanged model answers, of all trials, and sweeps over the answered trials; by model.

    The sweeps are empty if the model answers all trials or none.
    """
    if (name := UNIT_TABLES["answer"]) not in run.tables:
        return {}
    rows = with_objective(run.table(name))
    answered: dict[str, tuple[int, int, list[Effects]]] = {}
    for label, trials in rows.groupby("model", sort=False):
        answered_rows = trials[exceeds(trials["hits"], ANSWERED_THRESHOLD)]
        counts = answered_rows["doc"].nunique(), trials["doc"].nunique()
        is_part = 0 < counts[0] < counts[1]
        answered[str(label)] = (*counts, unit_sweeps(answered_rows, [str(label)]) if is_part else [])
    return answered


def set_sweeps(run: RunTables) -> list[Effects]:
    """Sweeps of sets of units that were changed together, with `run.influence_sets` and that of the answers."""
    rows = read_set_rows(run)
    if rows is None:
        return []
    return sweep_effects(rows.rename(columns={"component": "intervention"}), SET_SWEEP, run.models)


def ranked_sets(run: RunTables, key: Mapping[str, Any]) -> pd.DataFrame:
    """Effects of the sets that were selected by influence or at random, of the sweeps with these keys."""
    return _sets(run, key, are_named=False)


def named_sets(run: RunTables, key: Mapping[str, Any]) -> pd.DataFrame:
    """Effects of the sets that the user named, of the sweeps with these keys; `choice` is the name."""
    sets = _sets(run, key, are_named=True)
    return sets.assign(choice=sets["choice"].str.removeprefix(NAMED_SET_PREFIX)) if len(sets) else sets


def _sets(run: RunTables, key: Mapping[str, Any], are_named: bool) -> pd.DataFrame:
    sets = run.derived(_set_table)
    if sets.empty:
        return sets
    return rows_of_sweep(sets[sets["choice"].str.startswith(NAMED_SET_PREFIX) == are_named], key)


def _set_table(run: RunTables) -> pd.DataFrame:
    return effects_table(run.derived(set_sweeps))


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
