"""A sweep: one quantity, measured or estimated for many units over many samples, and the effect of every unit."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.base.heads import EXACT
from headscope.runs.aggregation import (
    SIGNIFICANCE,
    adjust_p_values,
    confidence_interval,
    linearise_ratios,
    plain_types,
    ratio_of_means_interval,
    ratio_test,
    t_test,
    wilson_interval,
)

UNIT_KEYS = ("layer", "kv_group", "head")
"""Keys of a head, or of a KV group if `head` is -1."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What separates the sweeps in a table, what a unit and a sample are, and which rows are estimates."""

    keys: tuple[str, ...]
    """Columns that separate one sweep from another. The first is the model."""
    sample: str
    """Column with the document, pair or trial. Means are over samples."""
    value: str
    """Column with the effect of one unit in one sample."""
    weight: str = ""
    """Column with the denominator of an effect that is a ratio, the same for all units of a sample. The effect over
    samples is then the ratio of means, so that a sample with a small denominator does not dominate it."""
    units: tuple[str, ...] = UNIT_KEYS
    """Columns that identify a unit within a sweep."""
    methods: tuple[str, ...] = (EXACT,)
    """Values of the column `method`, from the most to the least accurate. The first one is measured, all others are
    estimates. A table with one method needs no such column."""
    limits: tuple[float, float] = (-np.inf, np.inf)
    """Smallest and largest possible effect, at which intervals end."""
    is_share: bool = False
    """Whether the values are outcomes, 0 or 1, or means of them: their mean has Wilson's interval, and no p."""

    def intervals(
        self, values: npt.NDArray[np.float64], choices: int = 1, weights: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.float64]:
        """95 % confidence interval [2, units] of the mean of `values` [units, samples], allowing for `choices`.

        With `weights` [samples], the values are those of `linearise_ratios`.
        """
        if weights is not None:
            return self._ratio_intervals(values, np.broadcast_to(weights, values.shape), choices).clip(*self.limits)
        if self.is_share and values.shape[1]:
            return np.asarray(wilson_interval(values.mean(axis=1), values.shape[1], choices))
        return confidence_interval(values, choices).clip(*self.limits)

    def _ratio_intervals(
        self, values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], choices: int
    ) -> npt.NDArray[np.float64]:
        """Fieller's intervals of ratios. The denominator is common to all units: if only the allowance for `choices`
        opens an interval, it is Student's t of the linearised ratios."""
        ends = ratio_of_means_interval(values, weights, choices)
        if choices == 1 or np.isfinite(ends).all():
            return ends
        has_one = np.isfinite(ratio_of_means_interval(values, weights)).all(axis=0)
        is_open = ~np.isfinite(ends).all(axis=0) & has_one
        return np.where(is_open, confidence_interval(values, choices), ends)


@dataclass(frozen=True, eq=False)
class Effects:
    """The effects of all units of one sweep."""

    sweep: Sweep
    key: Mapping[str, Any]
    """The sweep's keys with their values."""
    units: pd.DataFrame
    """One row per unit: its keys, `effect` (mean over samples; of ratios the ratio of means), `low`, `high` (95 %
    confidence interval), `n` samples, `method`, `p` (two-sided t-test of 0) and `p_adjusted` (Benjamini-Hochberg over
    all units of the sweep; those that were only estimated count as tests with p = 1, because the estimates selected the
    others). An estimate, whose error is unknown, has no interval and no p; neither has an effect over fewer than three
    samples. Of ratios also `mean_of_ratios`."""
    values: pd.DataFrame
    """Effects by sample (columns) of the units (index, in the order of `units`) that have them, by the method of the
    unit, whose mean is the effect. NaN for a sample that was not measured. Ratios are linearised
    (`linearise_ratios`)."""
    estimates: pd.DataFrame
    """Mean estimate of every unit (index) by method (columns), over the samples in which the unit was measured if it
    was. NaN without."""
    estimate_sizes: pd.Series
    """Root mean square over samples of the most accurate estimate of every unit (index), by which units are selected;
    the absolute value of an estimate that was stored as a mean. NaN without."""
    weights: pd.Series | None = None
    """The denominators by sample (index) of effects that are ratios."""

    @property
    def model(self) -> str:
        """Label of the model."""
        return str(self.key[self.sweep.keys[0]])

    @property
    def where(self) -> dict[str, Any]:
        """The keys without the model: the conditions of a `Result`."""
        return {name: self.key[name] for name in self.sweep.keys[1:]}

    @property
    def is_exact(self) -> pd.Series:
        """Which units were measured."""
        return self.units["method"] == EXACT

    @property
    def exact(self) -> pd.DataFrame:
        """The units that were measured."""
        return self.units[self.is_exact]

    @property
    def candidates(self) -> pd.DataFrame:
        """The units among which the largest is sought: the measured ones, or all if every one was only estimated."""
        return self.exact if self.is_exact.any() else self.units

    @property
    def exact_values(self) -> pd.DataFrame:
        """The rows of `values` of the measured units."""
        return self.values.loc[self.values.index.isin(unit_index(self.exact, self.sweep))]

    @cached_property
    def unit_positions(self) -> dict[tuple[int, int, int], int]:
        """The row of each unit in `units`, by layer, KV group and head, which is -1 for a KV group."""
        places = self.units[[*UNIT_KEYS]].itertuples(index=False, name=None)
        return {place: position for position, place in enumerate(places)}

    @property
    def significant_count(self) -> int:
        """Number of effects that differ from zero at a false discovery rate of 5 %."""
        return int((self.units["p_adjusted"] < SIGNIFICANCE).sum())

    def by_sample(self, unit: pd.Series) -> dict[str, float]:
        """The effect of a unit (a row of `units`) in each sample; empty if there are only means."""
        index = self.unit_key(unit)
        row = self.values.loc[index].dropna() if index in self.values.index else pd.Series(dtype="float64")
        return {str(name): float(value) for name, value in row.items()}

    def interval(self, unit: pd.Series, choices: int) -> tuple[float, float]:
        """95 % confidence interval of the effect of a measured unit, allowing for the choice among `choices` units."""
        values = self.values.loc[self.unit_key(unit)].dropna()
        weights = None if self.weights is None else self.weights[values.index].to_numpy(np.float64)
        low, high = self.sweep.intervals(values.to_numpy(np.float64)[None], choices, weights)[:, 0]
        return float(low), float(high)

    def unit_key(self, unit: pd.Series) -> Any:
        """The label of a unit in the index of `values` and `estimates`."""
        names = self.sweep.units
        return unit[names[0]] if len(names) == 1 else tuple(unit[name] for name in names)


def unit_index(units: pd.DataFrame, sweep: Sweep) -> pd.Index:
    """The units of a table as an index."""
    names = [*sweep.units]
    return pd.Index(units[names[0]]) if len(names) == 1 else pd.MultiIndex.from_frame(units[names])


def sweep_effects(rows: pd.DataFrame, sweep: Sweep, models: Sequence[str]) -> list[Effects]:
    """The effects of every sweep in these rows, in the order of `models`, then in the order of the rows.

    A unit counts by its most accurate method. Rows that share a unit, a sample and a method are averaged.
    """
    groups: Any = plain_types(rows).groupby([*sweep.keys], sort=False)
    if sweep.weight:  # a ratio of means needs a mean difference
        groups = [(key, block) for key, block in groups if _weights_by_sample(block, sweep).sum() != 0]
    effects = [_effects_of(block, sweep, dict(zip(sweep.keys, key, strict=True))) for key, block in groups]
    return sorted(effects, key=lambda one: models.index(one.model))


def _weights_by_sample(rows: pd.DataFrame, sweep: Sweep) -> pd.Series:
    """The denominators of effects that are ratios by sample (index)."""
    return rows.groupby(sweep.sample)[sweep.weight].first().astype("float64")


def _effects_of(rows: pd.DataFrame, sweep: Sweep, key: Mapping[str, Any]) -> Effects:
    """The effects of one sweep, from its rows."""
    method = rows["method"] if "method" in rows else pd.Series(EXACT, rows.index)
    tables = {
        name: rows[method == name].pivot_table(index=[*sweep.units], columns=sweep.sample, values=sweep.value)
        for name in sweep.methods
        if (method == name).any()
    }
    weights = _weights_by_sample(rows, sweep) if sweep.weight else None
    exact = tables.get(EXACT)
    chosen: list[pd.DataFrame] = []
    methods: list[pd.Series] = []
    for name, table in tables.items():
        others = table[~table.index.isin([unit for block in chosen for unit in block.index])]
        chosen.append(others)
        methods.append(pd.Series(name, others.index))
    values = pd.concat(chosen).astype("float64").sort_index()
    estimates = {name: _estimate_means(table, exact, weights) for name, table in tables.items() if name != EXACT}
    by_method = pd.DataFrame(estimates, index=values.index, columns=[*estimates])
    sizes = (
        root_mean_squares(tables[next(iter(estimates))], weights).reindex(values.index)
        if estimates
        else pd.Series(np.nan, values.index)
    )
    units, by_sample = _unit_table(values, pd.concat(methods).reindex(values.index), sweep, weights)
    return Effects(sweep, key, units, by_sample, by_method, sizes, weights)


def _estimate_means(estimates: pd.DataFrame, exact: pd.DataFrame | None, weights: pd.Series | None) -> pd.Series:
    """Mean estimate of every unit, over the samples in which the unit was measured if it was."""
    if exact is not None:
        is_measured = exact.notna().reindex(index=estimates.index, columns=estimates.columns, fill_value=False)
        estimates = estimates.where(is_measured | ~estimates.index.isin(exact.index)[:, None])
    return _linearised(estimates, weights).mean(axis=1)


def _linearised(ratios: pd.DataFrame, weights: pd.Series | None) -> pd.DataFrame:
    """Ratios [units, samples] whose mean is the ratio of means; unchanged without the weights by sample."""
    if weights is None:
        return ratios
    of_units = np.broadcast_to(weights[ratios.columns].to_numpy(), ratios.shape)
    values = linearise_ratios(ratios.to_numpy(np.float64) * of_units, of_units)
    return pd.DataFrame(values, ratios.index, ratios.columns)


def root_mean_squares(values: pd.DataFrame, weights: pd.Series | None = None) -> pd.Series:
    """Root mean square over samples (columns) of every unit (index): its size, also if its signs differ.

    Ratios are first multiplied by their weights by sample, so that a small denominator does not make a unit large.
    """
    return (values if weights is None else values * weights[values.columns]).pow(2).mean(axis=1).pow(0.5)


def _unit_table(
    values: pd.DataFrame, methods: pd.Series, sweep: Sweep, weights: pd.Series | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The `Effects.units` and `Effects.values` of the values by sample."""
    by_sample = _linearised(values, weights)
    of_samples = None if weights is None else weights[values.columns].to_numpy()
    statistics = _mean_statistics(by_sample.to_numpy(), sweep, of_samples)
    statistics.loc[(methods != EXACT).to_numpy(), ["low", "high", "p"]] = np.nan
    if weights is not None:
        statistics["mean_of_ratios"] = values.mean(axis=1).to_numpy()
    units = values.index.to_frame(index=False).join(statistics).assign(method=methods.to_numpy())
    return units.assign(p_adjusted=adjust_p_values(units["p"])), by_sample


def _mean_statistics(
    values: npt.NDArray[np.float64], sweep: Sweep, weights: npt.NDArray[np.float64] | None
) -> pd.DataFrame:
    """Mean of every row [units, samples] with `low`, `high`, `p` and `n`, over the samples that are not NaN."""
    result = pd.DataFrame(np.nan, range(len(values)), ["effect", "low", "high", "p", "n"])
    for is_measured in np.unique(~np.isnan(values), axis=0):
        rows = (~np.isnan(values) == is_measured).all(axis=1)
        block = values[np.ix_(rows, is_measured)]
        of_samples = None if weights is None else weights[is_measured]
        means = block.mean(axis=1) if block.shape[1] else np.full(len(block), np.nan)
        if sweep.is_share:
            p = np.full(len(block), np.nan)
        else:
            p = t_test(block) if of_samples is None else ratio_test(block, np.broadcast_to(of_samples, block.shape))
        ends = sweep.intervals(block, weights=of_samples)
        result.loc[rows] = np.column_stack([means, *ends, p, np.full(len(block), block.shape[1])])
    return result.astype({"n": int})


def with_mean_estimates(effects: Effects | None, sweep: Sweep, key: Mapping[str, Any], means: pd.DataFrame) -> Effects:
    """Effects with estimates that were stored as means: `means` has `estimate` and `n` by unit (index).

    `effects` holds the measured units; None if there are none. The method of these estimates is the second of the
    sweep's methods. There may be millions.
    """
    method = sweep.methods[1]
    means = means.sort_index()
    if effects is None:
        values, measured = (
            pd.DataFrame(index=means.index[:0]),
            pd.DataFrame(columns=["effect", "low", "high", "p", "n"]),
        )
    else:
        values = effects.values
        statistics = ["effect", "low", "high", "p", "n", *(["mean_of_ratios"] if sweep.weight else [])]
        measured = effects.units.set_index(values.index)[statistics]
    units = means.rename(columns={"n": "n_estimated"}).join(measured.astype("float64"), how="outer").sort_index()
    is_exact = units["effect"].notna().to_numpy()
    estimates = pd.DataFrame({method: units["estimate"]})
    units["effect"] = units["effect"].fillna(units["estimate"])
    units["n"] = units["n"].fillna(units["n_estimated"]).astype(int)
    units["method"] = pd.Categorical.from_codes(is_exact.astype(np.int8), pd.Index([method, EXACT]))
    units["p_adjusted"] = adjust_p_values(units["p"])
    units = units.drop(columns=["estimate", "n_estimated"]).rename_axis([*sweep.units]).reset_index()
    weights = None if effects is None else effects.weights
    return Effects(sweep, key, units, values, estimates, estimates[method].abs(), weights)


def effects_table(effects: Sequence[Effects]) -> pd.DataFrame:
    """The units of several sweeps in one table, each with the keys of its sweep."""
    blocks = [one.units.assign(**one.key) for one in effects]
    return pd.concat(blocks, ignore_index=True) if blocks else pd.DataFrame()


def rows_of_sweep(rows: pd.DataFrame, key: Mapping[str, Any]) -> pd.DataFrame:
    """The rows with these values."""
    for name, value in key.items():
        rows = rows[rows[name] == value]
    return rows


def best_method_rows(rows: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """The rows of every unit by its most accurate method."""
    rank = rows["method"].map(sweep.methods.index)
    unit: list[Hashable] = [*sweep.keys, *sweep.units]
    return rows[rank == rank.groupby([rows[name] for name in unit]).transform("min")]


def shared_samples(samples: pd.DataFrame, by: Sequence[str], sample: str) -> pd.DataFrame:
    """The samples that count in every model, one row each: the columns `by` and `sample`.

    `samples` has one row per model and sample that counts, also with `model`. A model without any sample of a set
    (`by`) is disregarded.
    """
    model_count = samples.groupby([*by])["model"].transform("nunique")
    is_shared = samples.groupby([*by, sample])["model"].transform("nunique") == model_count
    return samples.loc[is_shared, [*by, sample]].drop_duplicates(ignore_index=True)
