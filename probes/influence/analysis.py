"""Analysis of influence: means over documents with confidence intervals and p-values, concentration, set effects.

Every difference is paired: both losses are those of one document.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.estimates import EXACT
from headscope.runs.aggregation import (
    MIN_DOCUMENTS,
    adjust_p_values,
    confidence_interval,
    rows_at_longest_length,
    t_test,
)
from headscope.runs.column_metadata import statistics
from headscope.runs.run_tables import RunTables
from probes.influence import bands
from probes.influence.effect_rows import add_damped_estimates, read_set_rows, read_unit_rows, with_objective
from probes.influence.heads import best_method_rows
from probes.influence.labels import ESTIMATE_LABELS, unit_nouns
from probes.influence.schema import NAMED_SET_PREFIX, SWEEP_KEYS, UNIT_COLUMNS, UNIT_TABLES

TOP_FRACTION = 0.05
"""Share of units in the tail of the influence distribution."""
ANSWERED_THRESHOLD = 0.5
"""A trial counts as answered if more than this share of the answer's tokens is the model's top prediction [ours]."""
SweepKey = tuple[str, int, str, str, str]
"""(model, context length, component, target, objective) of a sweep."""
SweepUnits = tuple[SweepKey, pd.DataFrame]
"""A sweep and its units."""
CURVE_COLUMNS = [*SWEEP_KEYS, "unit", "choice", "size", "mean", "low", "high"]


def unit_effects(influence: pd.DataFrame) -> pd.DataFrame:
    """One row per unit of every sweep and method, in nats/token over documents or trials.

    delta (mean), low, high (95 % confidence interval), minimum, maximum (over documents), p (two-sided t-test of zero),
    p_adjusted (Benjamini-Hochberg over the units of the sweep), documents (number). Below three documents and for
    estimates, whose error is unknown, low, high, p and p_adjusted are NaN.
    """
    return _tested(_mean_effects(with_objective(influence)), [*SWEEP_KEYS, "method"])


def best_unit_effects(influence: pd.DataFrame) -> pd.DataFrame:
    """`unit_effects` at the longest context length of each model, with the most accurate method of each unit.

    p-values are adjusted over all units of a sweep; those that were only estimated count as tests with p = 1.
    """
    best = best_method_rows(influence)
    methods = best.groupby([*SWEEP_KEYS, *UNIT_COLUMNS], observed=True, sort=False)["method"].first().reset_index()
    effects = _mean_effects(best.assign(method="best")).drop(columns="method")
    return _tested(effects.merge(methods, on=[*SWEEP_KEYS, *UNIT_COLUMNS]), SWEEP_KEYS)


def _mean_effects(rows: pd.DataFrame) -> pd.DataFrame:
    """The `unit_effects` without corrected p-values, with intervals and p-values for estimates too."""
    results = ["delta", "low", "high", "minimum", "maximum", "p", "documents"]
    blocks = [pd.DataFrame(columns=[*SWEEP_KEYS, "method", *UNIT_COLUMNS, *results])]
    for _, block in rows.groupby([*SWEEP_KEYS, "method"], observed=True, sort=False):
        table = block.astype({"delta_nll": "float64", "doc": "str"}).pivot_table(
            index=UNIT_COLUMNS, columns="doc", values="delta_nll", observed=True
        )
        numbers = table.to_numpy(dtype=np.float64)
        low, high = confidence_interval(numbers)
        ranges = {"low": low, "high": high, "minimum": numbers.min(axis=1), "maximum": numbers.max(axis=1)}
        effects = {"delta": numbers.mean(axis=1), **ranges, "p": t_test(numbers), "documents": numbers.shape[1]}
        sweep = {name: block[name].iloc[0] for name in [*SWEEP_KEYS, "method"]}
        blocks.append(pd.DataFrame(effects, index=table.index).reset_index().assign(**sweep))
    columns = blocks[0].columns
    return pd.concat(blocks[1:], ignore_index=True)[columns] if len(blocks) > 1 else blocks[0]


def _tested(effects: pd.DataFrame, test_keys: list[str]) -> pd.DataFrame:
    """The effects with `p_adjusted` over the units of equal `test_keys`, without intervals and p-values of
    estimates."""
    effects = effects.assign(**effects[["low", "high", "p"]].where(effects["method"] == EXACT))
    adjusted = effects.groupby(test_keys, observed=True, sort=False)["p"].transform(adjust_p_values)
    return effects.assign(p_adjusted=adjusted)


def sweeps_without_bands(run: RunTables) -> list[SweepUnits]:
    """All sweeps of a run except those of bands of rotary pairs, with their `best_unit_effects`."""
    return [sweep for sweep in run.derived(all_sweeps) if not bands.is_band(sweep[0][2])]


def band_sweeps(run: RunTables) -> list[tuple[tuple[str, int, str], pd.DataFrame]]:
    """Sweeps of bands of rotary pairs: (model, context length, objective) and the units of every band."""
    sweeps: dict[tuple[str, int, str], list[pd.DataFrame]] = {}
    for (label, length, component, _, objective), units in run.derived(all_sweeps):
        if bands.is_band(component):
            sweeps.setdefault((label, length, objective), []).append(units)
    return [(key, pd.concat(blocks, ignore_index=True)) for key, blocks in sweeps.items()]


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


def all_sweeps(run: RunTables) -> list[SweepUnits]:
    """All sweeps of a run with their `best_unit_effects`."""
    rows = read_unit_rows(run)
    groups: Any = [] if rows is None else best_unit_effects(rows).groupby(SWEEP_KEYS, observed=True, sort=False)
    return [*groups]


def top_heads_by_statistic(heads: pd.DataFrame) -> dict[str, pd.Series]:
    """The top head of one model for every statistic whose top head has a name, by the statistic's column.

    `heads` are the model's rows of the per-head table. Statistics without values are left out.
    """
    best_head_columns = [name for name, statistic in statistics().items() if statistic.best_head_name and name in heads]
    measured = (name for name in best_head_columns if heads[name].notna().any())
    return {name: heads.iloc[int(heads[name].fillna(-np.inf).argmax())] for name in measured}


def unit_of_head(units: pd.DataFrame, head: pd.Series) -> pd.DataFrame:
    """The unit that is or contains a query head, as one row; no row if the sweep lacks it."""
    group = (units["layer"] == head["layer"]) & (units["kv_group"] == head["kv_group"])
    unit: pd.DataFrame = units[group & units["head"].isin([-1, head["head"]])]
    return unit


def covers_all_units(units: pd.DataFrame, heads: pd.DataFrame) -> bool:
    """Whether a sweep covers every unit of its model, not only the heads of named sets. `heads` are the model's."""
    unit_columns = UNIT_COLUMNS[:2] if (units["head"] < 0).all() else ["layer", "head"]
    return len(units) >= len(heads[unit_columns].drop_duplicates())


def unit_rank(units: pd.DataFrame, unit: pd.Series) -> int:
    """Rank of a unit by influence, from 1 for the largest rise of the loss."""
    return int((units["delta"] > unit["delta"]).sum()) + 1


def gini(values: npt.ArrayLike) -> float:
    """Gini coefficient of the absolute values: 0 if all are equal, close to 1 if one is much larger than the rest."""
    sizes = np.sort(np.abs(np.asarray(values, dtype=np.float64)))
    if not sizes.sum():
        return 0.0
    count = len(sizes)
    return float((2 * np.arange(1, count + 1) - count - 1) @ sizes / (count * sizes.sum()))


def top_unit_count(units: int) -> int:
    """Number of units in the top 5 %, rounded up."""
    return math.ceil(TOP_FRACTION * units)


def top_share(values: npt.ArrayLike) -> float:
    """Share of the total positive change that the top 5 % of units contribute, 0..1; 0 if no change is positive."""
    rises = np.sort(np.asarray(values, dtype=np.float64).clip(min=0))[::-1]
    return float(rises[: top_unit_count(len(rises))].sum() / rises.sum()) if rises.sum() else 0.0


def changes_by_document(run: RunTables, key: SweepKey) -> pd.DataFrame:
    """Changes of a sweep (nats/token): one row per unit, one column per document or trial."""
    rows = run.derived(document_effects)
    for name, value in zip(SWEEP_KEYS, key, strict=True):
        rows = rows[rows[name] == value]
    rows = rows.astype({"delta_nll": "float64", "doc": "str"})
    return rows.pivot_table(index=UNIT_COLUMNS, columns="doc", values="delta_nll", observed=True)


def top_share_interval(changes: pd.DataFrame) -> tuple[float, float]:
    """95 % confidence interval of `top_share` over documents, by the jackknife with Student's t; NaN below three."""
    count = changes.shape[1]
    if count < MIN_DOCUMENTS:
        return np.nan, np.nan
    full_share = top_share(changes.mean(axis=1))
    without = [top_share(changes.drop(columns=document).mean(axis=1)) for document in changes]
    low, high = confidence_interval((count * full_share - (count - 1) * np.array(without))[None])[:, 0]
    return float(max(low, 0)), float(min(high, 1))


def margin_over_rank(changes: pd.DataFrame, unit: pd.Series, rank: int) -> tuple[float, float, float]:
    """The change of `unit` minus that of the unit that is `rank`-th among the others, with its 95 % interval.

    Above 0 the unit is among the top `rank`; nats/token, paired by document.
    """
    unit_key = tuple(unit[UNIT_COLUMNS])
    rival = changes.drop(index=unit_key).mean(axis=1).nlargest(rank).index[-1]
    difference = (changes.loc[unit_key] - changes.loc[rival]).to_numpy(dtype=np.float64)
    low, high = confidence_interval(difference[None])[:, 0]
    return float(difference.mean()), float(low), float(high)


def answered_trials(run: RunTables) -> dict[str, tuple[int, int, list[SweepUnits]]]:
    """Number of trials that the unchanged model answers, of all trials, and sweeps over the answered trials; by model.

    The sweeps are empty if the model answers all trials or none.
    """
    if (name := UNIT_TABLES["answer"]) not in run.tables:
        return {}
    rows = with_objective(run.table(name))
    answered: dict[str, tuple[int, int, list[SweepUnits]]] = {}
    for label, trials in rows.groupby("model", sort=False):
        answered_rows = trials[trials["hits"] > ANSWERED_THRESHOLD]
        counts = answered_rows["doc"].nunique(), trials["doc"].nunique()
        groups: Any = []
        if 0 < counts[0] < counts[1]:
            groups = best_unit_effects(answered_rows).groupby(SWEEP_KEYS, observed=True, sort=False)
        answered[str(label)] = (*counts, [*groups])
    return answered


def estimate_agreement(influence: pd.DataFrame) -> pd.DataFrame:
    """Agreement of each estimate with exact evaluation, on the units that have both.

    spearman, pearson: correlations of the means over documents, NaN below three units. shared: number of units among
    the `top` (at most 10) largest |delta| of both. compared: number of units. nouns: what they are.
    """
    rows = []
    for sweep, block in unit_effects(add_damped_estimates(with_objective(influence))).groupby(
        SWEEP_KEYS, observed=True, sort=False
    ):
        by_method = block.pivot_table(index=UNIT_COLUMNS, columns="method", values="delta", observed=True)
        for method in ESTIMATE_LABELS:
            if method not in by_method or "exact" not in by_method:
                continue
            compared = by_method[[method, "exact"]].dropna()
            top = min(10, len(compared))
            largest = [set(compared[name].abs().nlargest(top).index) for name in compared]
            correlations = {
                kind: compared.corr(kind).iloc[0, 1] if len(compared) > 2 else np.nan
                for kind in ("spearman", "pearson")
            }
            counts = {"shared": len(largest[0] & largest[1]), "top": top, "compared": len(compared)}
            nouns = unit_nouns(compared.index.to_frame())
            sweep_columns = dict(zip(SWEEP_KEYS, sweep, strict=True))
            rows.append({**sweep_columns, "method": method, **correlations, **counts, "nouns": nouns})
    return pd.DataFrame(
        rows, columns=[*SWEEP_KEYS, "method", "spearman", "pearson", "shared", "top", "compared", "nouns"]
    )


def set_effects(sets: pd.DataFrame) -> pd.DataFrame:
    """Effects of changing sets of units together, one row per sweep, kind of unit, choice and size.

    mean: over documents and draws, in nats/token. low, high: 95 % confidence interval over documents.
    """
    frame = with_objective(sets).astype({"delta_nll": "float64", "doc": "str"})
    rows = []
    for key, block in frame.groupby([*SWEEP_KEYS, "unit", "choice", "size"], observed=True, sort=False):
        by_doc = block.groupby("doc")["delta_nll"].mean().to_numpy()[None]
        low, high = confidence_interval(by_doc)
        rows.append((*key, by_doc.mean(), low[0], high[0]))
    return pd.DataFrame(rows, columns=CURVE_COLUMNS)


def unit_of_largest_rise(units: pd.DataFrame) -> pd.Series:
    """The unit whose change raises the loss most."""
    return units.sort_values("delta", ascending=False, kind="stable").iloc[0]


def joint_effects(run: RunTables, label: str, length: int, objective: str) -> pd.DataFrame:
    """The rows of `ranked_set_effects` of one model, length and objective."""
    rows = run.derived(ranked_set_effects)
    return rows[(rows["model"] == label) & (rows["context_length"] == length) & (rows["objective"] == objective)]


def document_effects(run: RunTables) -> pd.DataFrame:
    """Effects of every unit in each document or trial (`best_method_rows`)."""
    rows = read_unit_rows(run)
    assert rows is not None, "only called for sweeps of the run"
    return best_method_rows(rows)


def ranked_set_effects(run: RunTables) -> pd.DataFrame:
    """`set_effects` of the sets selected by influence or at random; may have no rows."""
    effects = run.derived(_all_set_effects)
    return effects[~_is_named_set(effects)]


def named_set_effects(run: RunTables) -> pd.DataFrame:
    """`set_effects` of the sets that the user named; `choice` is the name."""
    effects = run.derived(_all_set_effects)
    named_set_rows = effects[_is_named_set(effects)]
    return named_set_rows.assign(choice=named_set_rows["choice"].astype("str").str.removeprefix(NAMED_SET_PREFIX))


def _all_set_effects(run: RunTables) -> pd.DataFrame:
    rows = read_set_rows(run)
    return pd.DataFrame(columns=CURVE_COLUMNS) if rows is None else set_effects(rows)


def _is_named_set(sets: pd.DataFrame) -> pd.Series:
    return sets["choice"].astype("str").str.startswith(NAMED_SET_PREFIX)
