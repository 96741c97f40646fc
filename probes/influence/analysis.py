"""What the influence probe found: means over documents with intervals and p-values, concentration, agreement, curves.

Everything is paired by document, since each difference is formed within one. Reads the tables, knows no figures.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr

from headscope.runs.aggregation import MIN_DOCUMENTS, confidence_interval
from headscope.runs.column_metadata import statistics
from headscope.runs.run_tables import RunTables
from probes.influence import bands
from probes.influence.damping import add_damped_estimates
from probes.influence.heads import COMPONENT_DESCRIPTIONS, best_method_rows
from probes.influence.objectives import TEXT_NOUNS, read_set_rows, read_unit_rows, with_objective
from probes.influence.tables import NAMED_SET_PREFIX, SWEEP_KEYS, UNIT_COLUMNS, UNIT_TABLES

TAIL_FRACTION = 0.05
"""Share of units whose part of the whole influence is told."""
ANSWERED_THRESHOLD = 0.5
"""Share of an answer's tokens that tells a trial as answered."""
SweepKey = tuple[str, int, str, str, str]
"""(model, context length, component, target, objective) of a sweep."""
SweepUnits = tuple[SweepKey, pd.DataFrame]
"""A sweep and its units."""
CURVE_COLUMNS = [*SWEEP_KEYS, "unit", "choice", "size", "mean", "low", "high"]
ESTIMATE_LABELS = {"estimate": "first-order", "curved": "second-order", "damped": "damped second-order"}


def unit_effects(influence: pd.DataFrame) -> pd.DataFrame:
    """One row per unit of every sweep and method, in nats/token over documents, or trials.

    delta (mean), low, high (95 % interval), least, most (over documents), p (two-sided t-test of zero) and p_adjusted
    (Benjamini-Hochberg over the units of the sweep), documents. Below three documents low, high and p are NaN.
    """
    blocks = []
    for _, block in with_objective(influence).groupby([*SWEEP_KEYS, "method"], observed=True, sort=False):
        # Documents are the columns, so that every unit of a sweep shares the bootstrap's draws.
        table = block.astype({"delta_nll": "float64", "doc": "str"}).pivot_table(
            index=UNIT_COLUMNS, columns="doc", values="delta_nll", observed=True
        )
        numbers = table.to_numpy(dtype=np.float64)
        low, high = confidence_interval(numbers)
        p = _t_test(numbers)
        ends = {"low": low, "high": high, "least": numbers.min(axis=1), "most": numbers.max(axis=1)}
        told = {"delta": numbers.mean(axis=1), **ends, "p": p, "p_adjusted": adjust_p_values(p)}
        same = {name: block[name].iloc[0] for name in [*SWEEP_KEYS, "method"]}
        blocks.append(
            pd.DataFrame({**told, "documents": numbers.shape[1]}, index=table.index).reset_index().assign(**same)
        )
    columns = [
        *SWEEP_KEYS,
        "method",
        *UNIT_COLUMNS,
        "delta",
        "low",
        "high",
        "least",
        "most",
        "p",
        "p_adjusted",
        "documents",
    ]
    return pd.concat(blocks, ignore_index=True)[columns] if blocks else pd.DataFrame(columns=columns)


def best_unit_effects(influence: pd.DataFrame) -> pd.DataFrame:
    """`units` of the sweeps to show: the longest length of each model, each unit by the method that knows it best.

    p-values are adjusted over all units of a sweep, whatever their methods.
    """
    best = best_method_rows(influence)
    methods = best.groupby([*SWEEP_KEYS, *UNIT_COLUMNS], observed=True, sort=False)["method"].first().reset_index()
    return (
        unit_effects(best.assign(method="best")).drop(columns="method").merge(methods, on=[*SWEEP_KEYS, *UNIT_COLUMNS])
    )


def sweeps_without_bands(run: RunTables) -> list[SweepUnits]:
    """Each sweep of the run but those of bands of pairs, with its units as `shown`; [] without any."""
    return [sweep for sweep in run.derived(all_sweeps) if not bands.is_band(sweep[0][2])]


def band_sweeps(run: RunTables) -> list[tuple[tuple[str, int, str], pd.DataFrame]]:
    """What was found of bands of pairs: (model, context length, objective), and the units of each band's sweep."""
    found: dict[tuple[str, int, str], list[pd.DataFrame]] = {}
    for (label, length, component, _, objective), units in run.derived(all_sweeps):
        if bands.is_band(component):
            found.setdefault((label, length, objective), []).append(units)
    return [(key, pd.concat(blocks, ignore_index=True)) for key, blocks in found.items()]


def band_wavelengths(run: RunTables, label: str, components: Iterable[str]) -> dict[str, str]:
    """The wavelengths of the checkpoint's own pairs in each band of a model, in words, by the band's label."""
    if "positions" not in run.tables:
        return {}
    own = run.table("positions")
    own = own[(own["model"] == label) & np.isfinite(own["log_theta_base"])]
    waves = (2 * np.pi * np.exp(-own["log_theta_base"].astype("float64"))).groupby(own["pair"]).agg(["min", "max"])
    told: dict[str, str] = {}
    for band in dict.fromkeys(map(bands.band_label, components)):
        if band not in bands.WAVELENGTH_BANDS:
            mine = waves.loc[slice(*map(int, band.split("-")))]
            told |= {band: f"{mine['min'].min():,.0f} to {mine['max'].max():,.0f} tokens"} if len(mine) else {}
    return told


def all_sweeps(run: RunTables) -> list[SweepUnits]:
    """Each sweep of the run with its units as `shown`."""
    found = read_unit_rows(run)
    groups: Any = [] if found is None else best_unit_effects(found).groupby(SWEEP_KEYS, observed=True, sort=False)
    return [*groups]


def top_heads_by_statistic(heads: pd.DataFrame) -> dict[str, pd.Series]:
    """The best head of one model by every statistic whose best head has a name, by that statistic's column."""
    named = [name for name, statistic in statistics().items() if statistic.best_head_name and name in heads]
    known = (name for name in named if heads[name].notna().any())
    return {name: heads.iloc[int(heads[name].fillna(-np.inf).argmax())] for name in known}


def unit_of_head(units: pd.DataFrame, head: pd.Series) -> pd.DataFrame:
    """The unit that is this query head, or the group that it belongs to."""
    group = (units["layer"] == head["layer"]) & (units["kv_group"] == head["kv_group"])
    unit: pd.DataFrame = units[group & units["head"].isin([-1, head["head"]])]
    return unit


def covers_all_units(units: pd.DataFrame, heads: pd.DataFrame) -> bool:
    """Whether a sweep has every unit of its model, whose heads these are, and not only those of named sets."""
    place = UNIT_COLUMNS[:2] if (units["head"] < 0).all() else ["layer", "head"]
    return len(units) >= len(heads[place].drop_duplicates())


def unit_rank(units: pd.DataFrame, unit: pd.Series) -> int:
    """Place of a unit in its sweep, the most harmful reset first, from 1."""
    return int((units["delta"] > unit["delta"]).sum()) + 1


def describe_methods(units: pd.DataFrame) -> str:
    """How the units of one sweep were found, in words."""
    methods = units["method"].value_counts()
    rest = " and ".join(f"{told} estimate" for name, told in ESTIMATE_LABELS.items() if name in methods)
    if "exact" not in methods:
        return rest
    return f"exact for {methods['exact']} of {len(units)} units, else {rest}" if rest else "exact"


def adjust_p_values(p: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Benjamini-Hochberg adjusted p-values, which bound the false discovery rate; NaN stay NaN."""
    if not len(p) or np.isnan(p).any():
        return np.full_like(p, np.nan)
    from scipy.stats import false_discovery_control  # takes a second to import

    found: npt.NDArray[np.float64] = false_discovery_control(p)
    return found


def gini(values: npt.ArrayLike) -> float:
    """Gini coefficient of the absolute values: 0 where all are equal, towards 1 where one holds everything."""
    sizes = np.sort(np.abs(np.asarray(values, dtype=np.float64)))
    if not sizes.sum():
        return 0.0
    count = len(sizes)
    return float((2 * np.arange(1, count + 1) - count - 1) @ sizes / (count * sizes.sum()))


def top_share(values: npt.ArrayLike) -> float:
    """Part of the summed absolute values that the largest 5 % of units (at least one) hold, 0..1."""
    sizes = np.sort(np.abs(np.asarray(values, dtype=np.float64)))[::-1]
    return float(sizes[: max(1, round(TAIL_FRACTION * len(sizes)))].sum() / sizes.sum()) if sizes.sum() else 0.0


def answered_trials(run: RunTables) -> dict[str, tuple[int, int, list[SweepUnits]]]:
    """By model: the trials that it answers with nothing changed, of how many, and the sweeps of these alone.

    It answers one where it finds more than half of the answer's tokens likeliest, one by one [ours].
    """
    if (name := UNIT_TABLES["answer"]) not in run.tables:
        return {}
    rows = with_objective(run.table(name))
    told: dict[str, tuple[int, int, list[SweepUnits]]] = {}
    for label, mine in rows.groupby("model", sort=False):
        right = mine[mine["hits"] > ANSWERED_THRESHOLD]
        counts = right["doc"].nunique(), mine["doc"].nunique()
        groups: Any = (
            best_unit_effects(right).groupby(SWEEP_KEYS, observed=True, sort=False) if 0 < counts[0] < counts[1] else []
        )
        told[str(label)] = (*counts, [*groups])
    return told


def estimate_agreement(influence: pd.DataFrame) -> pd.DataFrame:
    """Each estimate against exact, on the units that have both: spearman and pearson of the means over documents,
    `shared` of the `top` (10, or fewer) largest |delta|, and how many units were `compared`."""
    rows = []
    for sweep, block in unit_effects(add_damped_estimates(with_objective(influence))).groupby(
        SWEEP_KEYS, observed=True, sort=False
    ):
        by_method = block.pivot_table(index=UNIT_COLUMNS, columns="method", values="delta", observed=True)
        for method in ESTIMATE_LABELS:
            if method not in by_method or "exact" not in by_method:
                continue
            both = by_method[[method, "exact"]].dropna()
            top = min(10, len(both))
            largest = [set(both[name].abs().nlargest(top).index) for name in both]
            ranks, line = (both.corr(kind).iloc[0, 1] if len(both) > 2 else np.nan for kind in ("spearman", "pearson"))
            told = {"method": method, "spearman": ranks, "pearson": line, "top": top, "compared": len(both)}
            rows.append({**dict(zip(SWEEP_KEYS, sweep, strict=True)), **told, "shared": len(largest[0] & largest[1])})
    return pd.DataFrame(rows, columns=[*SWEEP_KEYS, "method", "spearman", "pearson", "shared", "top", "compared"])


def set_effects(sets: pd.DataFrame) -> pd.DataFrame:
    """Effect of resetting sets together: by sweep, unit, choice and size the mean over documents and draws
    (nats/token) with a 95 % interval over documents."""
    frame = with_objective(sets).astype({"delta_nll": "float64", "doc": "str"})
    rows = []
    for key, block in frame.groupby([*SWEEP_KEYS, "unit", "choice", "size"], observed=True, sort=False):
        by_doc = block.groupby("doc")["delta_nll"].mean().to_numpy()[None]
        low, high = confidence_interval(by_doc)
        rows.append((*key, by_doc.mean(), low[0], high[0]))
    return pd.DataFrame(rows, columns=CURVE_COLUMNS)


def most_harmful_unit(units: pd.DataFrame) -> pd.Series:
    """The unit whose change harms most."""
    return units.sort_values("delta", ascending=False, kind="stable").iloc[0]


def joint_effects(run: RunTables, label: str, length: int, objective: str) -> pd.DataFrame:
    """The rows of `curves` of one model, length and objective."""
    found = run.derived(ranked_set_effects)
    same = (found["model"] == label) & (found["context_length"] == length) & (found["objective"] == objective)
    return found[same]


def unit_label(unit: pd.Series) -> str:
    """A unit in words."""
    who = f"key group {unit['kv_group']}" if unit["head"] < 0 else f"head {unit['head']}"
    return f"layer {unit['layer']}, {who}"


def describe_change(component: str, target: str, objective: str = "text") -> str:
    """What was done, in words, and the loss of what where that is not a text: "frequencies reset to init"."""
    told = (
        bands.describe_band(component) if bands.is_band(component) else COMPONENT_DESCRIPTIONS.get(component, component)
    )
    done = told if target == "none" else f"{told} reset to {target}"
    return done if objective == "text" else f"{done}: loss of the answer"


def describe_context_length(length: int, objective: str) -> str:
    """How long the contexts of a sweep are, in words."""
    return f"{'up to ' if objective == 'answer' else ''}{length:,} tokens"


def describe_uncertainty(unit: pd.Series) -> str:
    """What stands behind the number of a unit: how it was found, and its interval or the documents' own values."""
    estimated = "" if unit["method"] == "exact" else "estimated, "
    if not np.isnan(unit["low"]):
        return f" ({estimated}95 % interval {unit['low']:+.2g} to {unit['high']:+.2g})"
    noun = TEXT_NOUNS[unit["objective"]]
    if unit["documents"] == 1:
        return f" ({estimated}one {noun})"
    return f" ({estimated}two {noun}s: {unit['least']:+.2g} and {unit['most']:+.2g})"


def format_q_value(unit: pd.Series) -> str:
    """The q-value of a unit in words; "" where its documents carry none."""
    return "" if np.isnan(unit["p_adjusted"]) else f", q = {unit['p_adjusted']:.2g}"


def document_effects(run: RunTables) -> pd.DataFrame:
    """Rows as `chosen`, found once: what each document or trial says of each unit."""
    found = read_unit_rows(run)
    assert found is not None, "asked for of a sweep of the run"
    return best_method_rows(found)


def ranked_set_effects(run: RunTables) -> pd.DataFrame:
    """`curve` of the sets that were chosen by influence or at random, found once; no rows without any."""
    every = run.derived(_all_set_effects)
    return every[~_is_named_set(every)]


def named_set_effects(run: RunTables) -> pd.DataFrame:
    """The rows of `curve` of sets that the user named, their `choice` being that name."""
    every = run.derived(_all_set_effects)
    mine = every[_is_named_set(every)]
    return mine.assign(choice=mine["choice"].astype("str").str.removeprefix(NAMED_SET_PREFIX))


def _all_set_effects(run: RunTables) -> pd.DataFrame:
    found = read_set_rows(run)
    return pd.DataFrame(columns=CURVE_COLUMNS) if found is None else set_effects(found)


def _is_named_set(sets: pd.DataFrame) -> pd.Series:
    return sets["choice"].astype("str").str.startswith(NAMED_SET_PREFIX)


def _t_test(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Two-sided p of a zero mean for each row; 1 where a row never differs from zero."""
    if numbers.shape[1] < MIN_DOCUMENTS:
        return np.full(len(numbers), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = numbers.std(axis=1, ddof=1) / np.sqrt(numbers.shape[1])
        t = np.abs(numbers.mean(axis=1)) / error
    p: npt.NDArray[np.float64] = 2 * stdtr(numbers.shape[1] - 1, -np.nan_to_num(t, nan=0.0))
    return p
