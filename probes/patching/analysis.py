"""Analysis of patches: mean effects over pairs with intervals, agreement of estimates, columns of the per-head table.

Every mean is over the pairs whose metric differs enough between the clean and the corrupted prompt
(`schema.MIN_DIFFERENCE`) in every model of the run, so that the effects of models can be compared. A unit counts as
exact if it was patched exactly, else as estimated.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from headscope.prompts.answers import ask_about_exchange
from headscope.runs.aggregation import (
    HEAD_KEYS,
    adjust_p_values,
    confidence_interval,
    group_members,
    mean_with_interval,
    plain_types,
    t_test,
    with_method,
)
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.patching.schema import (
    ACTIVATION_LABELS,
    ALL_POSITIONS,
    MIN_DIFFERENCE,
    PATCHING,
    PATCHING_SPANS,
    WHOLE_GROUP,
)

SWEEP_KEYS = ["model", "prompts", "metric", "activation", "direction"]
"""Keys of one sweep over all units."""
UNIT_KEYS = ["layer", "kv_group", "head"]
SweepKey = tuple[str, str, str, str, str]
"""(model, prompts, metric, activation, direction)."""
AGREEMENT_TOP = 10
"""Units whose overlap between estimates and exact effects is counted."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"patching_{activation}": Statistic(
            f"effect of patching the {label}",
            "",
            "fraction of the metric's difference between the clean and the corrupted run that patching the "
            f"{label} of the head or of its KV group recovers (denoising) or, if only noising was run, removes; mean "
            f"over the pairs of all prompt sets whose metrics differ by at least {MIN_DIFFERENCE} in every model; "
            "exact where patched, else estimated",
            number_format="+.2f",
        )
        for activation, label in ACTIVATION_LABELS.items()
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns `patching_<activation>` by (model, layer, head, kv_group), each with its confidence interval over pairs
    and its method: exact; estimate, which has no interval; or mixed, if only some prompt sets were patched exactly.

    Denoising where it was measured, else noising. Every head of a KV group has the effect of the group.
    """
    rows = _usable_rows(run)
    if rows is None or rows.empty:
        return None
    order = rows["direction"].map({"denoising": 0, "noising": 1})
    rows = rows[order == order.groupby([rows["model"], rows["activation"]]).transform("min")]
    rows = _best_method(rows).merge(group_members(run.manifest["models"]), on=["model", "layer", "kv_group"])
    rows = rows[(rows["head"] == WHOLE_GROUP) | (rows["head"] == rows["member"])].assign(head=lambda f: f["member"])
    rows = rows.assign(doc=rows["prompts"] + "/" + rows["pair"])
    groups: Any = rows.groupby("activation", sort=False)
    return pd.concat(
        [
            with_method(
                mean_with_interval(block.set_index([*HEAD_KEYS, "doc"])["effect"], f"patching_{activation}"),
                block.set_index(HEAD_KEYS)["method"],
            )
            for activation, block in groups
        ],
        axis=1,
    )


def unit_effects(run: RunTables) -> pd.DataFrame:
    """One row per unit of every sweep: `effect` (mean over pairs), `low` and `high` (95 % interval), `pairs`, `method`,
    `p` and `p_adjusted` (two-sided t-test of 0; Benjamini-Hochberg over all units of the sweep, those that were only
    estimated with p = 1, because the estimates selected the others).

    low, high, p and p_adjusted are NaN for estimates, whose error is unknown, and below three pairs.
    """
    return _mean_effects(_usable_rows(run), SWEEP_KEYS, run)


def span_effects(run: RunTables) -> pd.DataFrame:
    """The same for patches of named spans, with the column `span`; each span of a sweep is corrected by itself."""
    rows = None
    if PATCHING_SPANS.name in run.tables:
        rows = run.table(PATCHING_SPANS.name)
        rows = plain_types(rows[rows["is_normalised"]]).merge(run.derived(pairs_usable_in_all_models))
    return _mean_effects(rows, [*SWEEP_KEYS, "span"], run)


def _mean_effects(rows: pd.DataFrame | None, sweep_keys: list[str], run: RunTables) -> pd.DataFrame:
    """Mean effects of every unit over pairs, by these keys."""
    columns = [*sweep_keys, *UNIT_KEYS, "method", "effect", "low", "high", "pairs", "p", "p_adjusted"]
    if rows is None or rows.empty:
        return pd.DataFrame(columns=columns)
    blocks = []
    groups: Any = _best_method(rows, sweep_keys).groupby([*sweep_keys, "method"], sort=False)
    for (*sweep, method), block in groups:
        table = block.pivot_table(index=UNIT_KEYS, columns="pair", values="effect")
        values = table.to_numpy(dtype=np.float64)
        unknown = np.full(len(values), np.nan)
        low, high, p = unknown, unknown, unknown
        if method == "exact":
            (low, high), p = confidence_interval(values), t_test(values)
        results = {"effect": values.mean(axis=1), "low": low, "high": high, "p": p}
        keys = dict(zip(sweep_keys, sweep, strict=True))
        frame = pd.DataFrame({**results, "pairs": values.shape[1]}, index=table.index).reset_index()
        blocks.append(frame.assign(**keys, method=method))
    effects = pd.concat(blocks, ignore_index=True)
    effects["p_adjusted"] = effects.groupby(sweep_keys, sort=False)["p"].transform(adjust_p_values)
    return effects[columns].sort_values([*sweep_keys, *UNIT_KEYS], key=order_of_models(run), ignore_index=True)


def order_of_models(run: RunTables) -> Callable[[pd.Series], pd.Series]:
    """A sort key that puts models in the order of the run."""
    return lambda column: column.map(run.models.index) if column.name == "model" else column


def sweeps(run: RunTables) -> list[tuple[SweepKey, pd.DataFrame]]:
    """The sweeps of a run with their `unit_effects`, in the order of the run's models."""
    groups: Any = run.derived(unit_effects).groupby(SWEEP_KEYS, sort=False)
    return [(key, units.reset_index(drop=True)) for key, units in groups]


def effects_by_span(run: RunTables, key: SweepKey) -> pd.DataFrame:
    """The `span_effects` of one sweep, in the order of the spans in the prompts; empty without spans."""
    effects = run.derived(span_effects)
    for name, value in zip(SWEEP_KEYS, key, strict=True):
        effects = effects[effects[name] == value]
    if effects.empty:
        return effects
    rows = run.table(PATCHING_SPANS.name)
    rows = rows[rows["prompts"] == key[1]]
    first_positions = rows.groupby("span", observed=True)["first"].mean().sort_values()
    return effects.assign(span=pd.Categorical(effects["span"], [*map(str, first_positions.index)]))


def exact_or_all(effects: pd.DataFrame) -> pd.DataFrame:
    """The exact rows of the units or paths of a sweep, or all rows if every one was only estimated."""
    exact = effects[effects["method"] == "exact"]
    return exact if len(exact) else effects


def largest_unit(units: pd.DataFrame) -> pd.Series:
    """The unit of largest effect, of the exact ones if there are any."""
    return exact_or_all(units).sort_values("effect", ascending=False, kind="stable").iloc[0]


def pair_metrics(run: RunTables, table: str = PATCHING.name) -> pd.DataFrame:
    """One row per pair of every model, set and metric: clean and corrupted metric, and whether it is normalised."""
    keys = ["model", "prompts", "metric", "pair"]
    rows = run.table(table)[[*keys, "metric_clean", "metric_corrupted", "is_normalised"]]
    return plain_types(rows.drop_duplicates(keys, ignore_index=True))


def questions_about_pairs(run: RunTables, table: str = PATCHING.name) -> list[tuple[str, str]]:
    """(model, question whether clean and corrupted prompts are exchanged) for the sets that give reason to ask."""
    groups: Any = run.derived(pair_metrics, table).groupby(["model", "prompts", "metric"], sort=False)
    questions = []
    for (model, prompts, metric), pairs in groups:
        clean, corrupted = (pairs[name].to_numpy() for name in ("metric_clean", "metric_corrupted"))
        if question := ask_about_exchange(metric, clean, corrupted):
            questions.append((model, f"{model}, {prompts}: {question}"))
    return questions


def pairs_usable_in_all_models(run: RunTables) -> pd.DataFrame:
    """The pairs that means are over, one row each: prompts, metric, pair.

    The metric of such a pair differs enough in every model. Models in which it differs enough in no pair of the set
    are disregarded.
    """
    usable = run.derived(pair_metrics).query("is_normalised")
    set_keys = ["prompts", "metric"]
    model_count = usable.groupby(set_keys)["model"].transform("nunique")
    is_shared = usable.groupby([*set_keys, "pair"])["model"].transform("size") == model_count
    return usable.loc[is_shared, [*set_keys, "pair"]].drop_duplicates(ignore_index=True)


def exact_effects(run: RunTables) -> dict[SweepKey, pd.DataFrame]:
    """The exact effects of each sweep: one row per unit (UNIT_KEYS), one column per shared pair."""
    rows = _usable_rows(run)
    if rows is None:
        return {}
    groups: Any = rows[rows["method"] == "exact"].groupby(SWEEP_KEYS, sort=False)
    return {key: sweep.pivot_table(index=UNIT_KEYS, columns="pair", values="effect") for key, sweep in groups}


def estimate_agreement(run: RunTables) -> pd.DataFrame:
    """Estimate and exact effect of the units that have both, in every sweep: mean over the same pairs.

    Columns: SWEEP_KEYS, UNIT_KEYS, `estimate`, `exact`.
    """
    rows = _usable_rows(run)
    columns = [*SWEEP_KEYS, *UNIT_KEYS, "estimate", "exact"]
    if rows is None or {"estimate", "exact"} - {*rows["method"]}:
        return pd.DataFrame(columns=columns)
    by_pair = rows.pivot_table(index=[*SWEEP_KEYS, *UNIT_KEYS, "pair"], columns="method", values="effect").dropna()
    return by_pair.groupby([*SWEEP_KEYS, *UNIT_KEYS], sort=False).mean().reset_index()[columns]


def agreement_of(units: pd.DataFrame) -> tuple[float, int, int]:
    """Spearman correlation (NaN below three units) of `estimate` and `exact`, and the number of units that are among
    the top of both by |effect|, with the size of that top."""
    size = min(AGREEMENT_TOP, len(units))
    tops = [set(units[name].abs().nlargest(size).index) for name in ("estimate", "exact")]
    spearman = units["estimate"].corr(units["exact"], "spearman") if len(units) > 2 else np.nan
    return float(spearman), len(tops[0] & tops[1]), size


def position_effects(run: RunTables, key: SweepKey, pair: str) -> pd.DataFrame:
    """Effects of every unit at every single position of one pair; exact if patched, else estimated. Empty without."""
    rows = run.table(PATCHING.name)
    rows = rows[rows["position"] != ALL_POSITIONS]
    for name, value in zip([*SWEEP_KEYS, "pair"], [*key, pair], strict=True):
        rows = rows[rows[name] == value]
    rows = plain_types(rows)
    exact = rows[rows["method"] == "exact"]
    return exact if len(exact) else rows


def _usable_rows(run: RunTables) -> pd.DataFrame | None:
    """Rows of patches at all positions, of the shared pairs; None if the run has no such table."""
    if PATCHING.name not in run.tables:
        return None
    rows = run.table(PATCHING.name)
    rows = plain_types(rows[(rows["position"] == ALL_POSITIONS) & rows["is_normalised"]])
    return rows.merge(run.derived(pairs_usable_in_all_models))


def _best_method(rows: pd.DataFrame, sweep_keys: Sequence[str] = SWEEP_KEYS) -> pd.DataFrame:
    """The exact rows of units that were patched exactly, and the estimates of the others."""
    is_exact = rows["method"] == "exact"
    has_exact = is_exact.groupby([rows[name] for name in [*sweep_keys, *UNIT_KEYS]]).transform("any")
    return rows[is_exact | ~has_exact]
