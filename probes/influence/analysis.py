"""Analysis of influence: effects of every unit in each sweep, of sets of units, and of bands of rotary pairs.

Every difference is paired: both losses are those of one document.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from headscope.effects.sweep import UNIT_KEYS, Effects, effects_table, rows_of_sweep, sweep_effects
from headscope.effects.units import units_of_head
from headscope.estimates import EXACT
from headscope.runs.aggregation import rows_at_longest_length
from headscope.runs.column_metadata import exceeds, statistics
from headscope.runs.run_tables import RunTables
from probes.influence import bands
from probes.influence.effect_rows import SWEEP, longest_rows, read_set_rows, read_unit_rows, with_objective
from probes.influence.schema import NAMED_SET_PREFIX, UNIT_TABLES

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
