"""Analysis of patches: effects of every unit over pairs, effects by span and position, columns of the per-head table.

Every effect is over the pairs that count (`is_counted`) in every model of the run, so that those of models can be
compared: the mean change of the metric divided by its mean difference between the prompts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.results.effects.comparison import Comparison, compare_effects, largest_change
from headscope.results.effects.prompts import by_subset, prompts_that_count, rows_that_count, with_subsets
from headscope.results.effects.statistics import MIN_COMPARED
from headscope.results.effects.sweep import Effects, Sweep, best_method_rows, sweep_effects
from headscope.results.effects.units import head_columns, unit_fields, unit_name, unit_nouns
from headscope.results.result import Bound, Result
from headscope.results.samples import mean_result
from headscope.results.verdicts import deciding_part, judge, judge_by_parts
from headscope.runs.aggregation import MIN_DOCUMENTS, Verdict, plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.patching.declaration import (
    ACTIVATION_LABELS,
    ALL_POSITIONS,
    LAYER_ACTIVATION_LABELS,
    PATCHING,
    PATCHING_LAYERS,
    PATCHING_SETS,
    PATCHING_SPANS,
)
from probes.patching.paths.declaration import LOGITS, TOGETHER


def patch_tables(run: RunTables) -> list[str]:
    """The tables of the run with patches of heads and of layers."""
    return [table.name for table in (PATCHING, PATCHING_LAYERS) if table.name in run.tables]


def pair_metrics(run: RunTables, table: str = "") -> pd.DataFrame:
    """One row per pair of every model, set and metric: clean and corrupted metric, whether they differ enough, and
    whether means include the pair. Without a `table`, the pairs of all patches of heads and layers."""
    keys = ["model", "prompts", "metric", "pair"]
    columns = [*keys, "metric_clean", "metric_corrupted", "is_normalised", "is_counted"]
    rows = [
        plain_types(run.table(name)[columns].drop_duplicates(keys))
        for name in [table] * bool(table) or patch_tables(run)
    ]
    return pd.concat(rows).drop_duplicates(keys, ignore_index=True)


def pairs_usable_in_all_models(run: RunTables) -> pd.DataFrame:
    """The pairs that effects are over: those that count in every model."""
    return prompts_that_count(run.derived(pair_metrics))


SWEEP = Sweep(
    keys=("model", "prompts", "metric", "intervention", "direction"),
    sample="pair",
    value="effect",
    weight="difference",
    methods=("exact", "estimate"),
)
"""Patches of one unit at all positions. The intervention is the patched activation."""
SPAN_SWEEP = replace(SWEEP, keys=(*SWEEP.keys, "span"))
"""Patches of one unit at the positions of a named span."""
PAIR_SWEEP = by_subset(SWEEP)
"""Patches of one unit at all positions, in one pair or group of pairs of a set."""
LAYER_SWEEP = replace(SPAN_SWEEP, units=("layer",))
"""Patches of one layer at all positions, whose span is "", or at those of a named span."""

SET_SWEEP = replace(SPAN_SWEEP, units=("size",), methods=("exact",))
"""Patches of all named heads together, as one unit."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"patching_{activation}": Statistic(
            f"effect of patching the {label}",
            "",
            "fraction of the metric's difference between the clean and the corrupted run that patching the "
            f"{label} of the head or of its KV group recovers (denoising) or, if only noising was run, removes; ratio "
            "of the means over the pairs of a prompt set that count in every model (is_counted), weighted over sets by "
            "their number of pairs; exact where patched, else estimated",
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
    if PATCHING.name not in run.tables or (rows := _unit_rows(run)).empty:
        return None
    order = rows["direction"].map({"denoising": 0, "noising": 1})
    rows = rows[order == order.groupby([rows["model"], rows["intervention"]]).transform("min")]
    names = {"column": "patching_" + rows["intervention"], "doc": rows["prompts"] + "/" + rows["pair"]}
    return head_columns(run, best_method_rows(rows.assign(**names), SWEEP), SWEEP)


def sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of a run over all positions, in the order of its models."""
    if PATCHING.name not in run.tables:
        return []
    return sweep_effects(_unit_rows(run), SWEEP, run.models)


def span_sweeps(run: RunTables) -> list[Effects]:
    """The sweeps over named spans, those of a model and set in the order of the spans in the prompts."""
    if PATCHING_SPANS.name not in run.tables:
        return []
    rows = run.table(PATCHING_SPANS.name)
    firsts = rows.groupby(["prompts", "span"], observed=True)["first"].mean()
    effects = sweep_effects(complete_rows(counted_rows(run, rows), SPAN_SWEEP), SPAN_SWEEP, run.models)
    sweep_order = {tuple(one.key.values())[:-1]: number for number, one in reversed([*enumerate(effects)])}
    return sorted(
        effects,
        key=lambda one: (sweep_order[tuple(one.key.values())[:-1]], firsts[one.key["prompts"], one.key["span"]]),
    )


def pair_sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of every pair or group that has results of its own, in the order of the set."""
    if PATCHING.name not in run.tables:
        return []
    rows = with_subsets(counted_rows(run, _rows_at_all_positions(run)))
    return sweep_effects(complete_rows(rows, PAIR_SWEEP), PAIR_SWEEP, run.models)


def layer_sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of layers over all positions and over named spans, in the order of the run's models."""
    if PATCHING_LAYERS.name not in run.tables:
        return []
    rows = run.table(PATCHING_LAYERS.name)
    is_whole = (rows["position"] == ALL_POSITIONS) | (rows["span"] != "")
    return sweep_effects(counted_rows(run, rows[is_whole]), LAYER_SWEEP, run.models)


def set_sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of the named heads together, over all positions and over named spans."""
    if PATCHING_SETS.name not in run.tables:
        return []
    return sweep_effects(counted_rows(run, run.table(PATCHING_SETS.name)), SET_SWEEP, run.models)


def parts_of_sweep(sweeps_of_parts: Sequence[Effects], effects: Effects) -> list[Effects]:
    """The sweeps by span, pair or group of a sweep over all positions and pairs, in their order."""
    return [part for part in sweeps_of_parts if effects.key.items() <= part.key.items()]


def complete_rows(rows: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """Drop the exact effects of units that were patched in only some pairs of their sweep; estimates remain.

    The estimates of those pairs selected these units, so their mean is not an effect over all pairs.
    """
    exact = rows["method"] == "exact"
    by_unit = rows[exact].groupby([*sweep.keys, *sweep.units])[sweep.sample].transform("size")
    most = by_unit.groupby([rows.loc[exact, name] for name in sweep.keys]).transform("max")
    return rows.drop(index=by_unit.index[by_unit < most])


def _rows_at_all_positions(run: RunTables) -> pd.DataFrame:
    rows = run.table(PATCHING.name)
    return rows[rows["position"] == ALL_POSITIONS]


def _unit_rows(run: RunTables) -> pd.DataFrame:
    """Rows of patches at all positions, of the pairs that count."""
    return complete_rows(counted_rows(run, _rows_at_all_positions(run)), SWEEP)


def counted_rows(run: RunTables, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the pairs that count in every model, with `difference` (`with_difference`)."""
    rows = rows_that_count(rows, run.derived(pairs_usable_in_all_models))
    return with_difference(rows.rename(columns={"activation": "intervention"}))


def with_difference(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `difference`, the metric of the clean minus that of the corrupted prompt, which effects divide."""
    return rows.assign(difference=rows["metric_clean"].astype("float64") - rows["metric_corrupted"])


TOP_UNITS = 5
"""Units of largest effect in the first model, which carry the task there."""
MIN_KEPT_SHARE = 0.5
"""Share of their summed effect that they keep in a model whose task the same units carry."""
MIN_CHANGE = 0.1
"""Change of the effect of a unit that counts."""

OPPOSITE: Mapping[Verdict, Verdict] = {
    "supported": "not supported",
    "not supported": "supported",
    "inconclusive": "inconclusive",
}


def model_results(run: Run) -> Iterator[Result]:
    """The changes of each sweep of every model but the first, then two verdicts: whether the same units carry the task,
    and whether the effect of at least one unit changes."""
    by_key = {tuple(effects.key.values()): effects for effects in run.derived(sweeps)}
    for (model, *conditions), after in by_key.items():
        before = by_key.get((run.models[0], *conditions))
        if model == run.models[0] or before is None:
            continue
        comparison = compare_effects(before, after)
        details = {
            "activation": ACTIVATION_LABELS[after.key["intervention"]],
            "nouns": unit_nouns(comparison.units),
            "pairs": comparison.n,
        }
        blank = Result(question="", model=model, baseline=before.model, where=after.where, details=details)
        yield from _change_results(comparison, blank)
        if len(comparison.before):
            yield _kept(comparison, blank)
        if len(comparison.exact):
            yield _changed(comparison, blank)


def _change_results(comparison: Comparison, blank: Result) -> Iterator[Result]:
    """The rank correlation of the effects, and the unit whose effect changes most, measured or not."""
    units = comparison.units
    value, low, high = comparison.rank_correlation
    if len(units) >= MIN_COMPARED and np.isfinite(value):
        counts = {"compared": len(units), "estimated": len(units) - len(comparison.exact) or None}
        correlation = replace(blank, question="patching.models", value=value, low=low, high=high, n=len(units))
        yield _detailed(correlation, counts)
    yield replace(_largest_change(comparison, units, blank), question="patching.largest_change")


def _kept(comparison: Comparison, blank: Result) -> Result:
    """Whether the units of largest effect in the first model keep at least `MIN_KEPT_SHARE` of their summed effect."""
    top = comparison.before.loc[comparison.before.mean(axis=1).nlargest(TOP_UNITS).index]
    names = [unit_name(unit) for _, unit in top.index.to_frame().iterrows()]
    claim = replace(blank, question="patching.kept", n=comparison.n)
    claim = _detailed(claim, {"top": len(top), "share": MIN_KEPT_SHARE, "heads": names})
    if missing := int((~top.index.isin(comparison.after.index)).sum()):
        counts = {"estimated": missing, "units": len(top), "unit_nouns": claim.details["nouns"]}
        return judge(_detailed(claim, counts), Bound("above"), "estimated")
    before, after = top.sum(), comparison.after.loc[top.index].sum()
    place = {name: getattr(claim, name) for name in ("model", "baseline", "where", "details")}
    claim = mean_result("patching.kept", after - MIN_KEPT_SHARE * before, **place)
    return judge(_detailed(claim, {"before": before.mean(), "after": after.mean()}), Bound("above"))


def _changed(comparison: Comparison, blank: Result) -> Result:
    """Whether the effect of at least one unit changes by more than `MIN_CHANGE`: the opposite of that all are stable,
    by simultaneous intervals."""
    stable = judge_by_parts(
        Result(question=""), map(_stable, comparison.exact.assign(choices=len(comparison.exact)).to_dict("records"))
    )
    verdicts = [part.verdict for part in stable.parts]
    need = deciding_part(stable)
    counts = {
        "limit": MIN_CHANGE,
        "compared": len(verdicts),
        "changed": verdicts.count("not supported"),
        "stable": verdicts.count("supported"),
        "undecided": verdicts.count("inconclusive"),
        "needed": need[1] if need and comparison.n >= MIN_DOCUMENTS else None,
    }
    claim = _detailed(_largest_change(comparison, comparison.exact, blank), counts)
    reason = "" if claim.has_interval else "few"
    return replace(claim, question="patching.changed", verdict=OPPOSITE[stable.verdict], reason=reason)


def _stable(unit: Mapping[Any, Any]) -> Result:
    """The verdict on the claim that the effect of one unit changes by less than `MIN_CHANGE`."""
    change = Result(
        question="",
        value=unit["change"],
        low=unit["low"],
        high=unit["high"],
        n=unit["n"],
        selected_from=unit["choices"],
    )
    return judge(change, Bound("between", -MIN_CHANGE, MIN_CHANGE))


def _largest_change(comparison: Comparison, units: pd.DataFrame, blank: Result) -> Result:
    """The largest change among these units; its interval allows for the choice among those that were measured."""
    unit = largest_change(units)
    result = replace(
        blank,
        **unit_fields(unit),
        value=float(unit["change"]),
        low=float(unit["low"]),
        high=float(unit["high"]),
        n=comparison.n,
        is_exact=bool(unit["is_exact"]),
        selected_from=len(comparison.exact) if unit["is_exact"] else len(units),
        by_sample=comparison.changes_of(unit) if unit["is_exact"] else {},
    )
    return _detailed(result, {"before": float(unit["before"]), "after": float(unit["after"])})


def _detailed(result: Result, details: Mapping[str, Any]) -> Result:
    return replace(result, details={**result.details, **details})


RECOMPUTED = (("norms", "norms"), ("mlps", "MLPs"))
"""Keys of a sweep that say what is recomputed, and their nouns."""


def describe_sweep(effects: Effects) -> str:
    """Text naming what is patched: "Denoising of the head output z"."""
    labels = {**ACTIVATION_LABELS, **LAYER_ACTIVATION_LABELS}
    return f"{effects.key['direction'].capitalize()} of the {labels[effects.key['intervention']]}"


def describe_path_sweep(effects: Effects) -> str:
    """Text naming a sweep: "Path patching, denoising"."""
    recomputed = "".join(f", {noun} recomputed" for name, noun in RECOMPUTED if effects.key[name] == "recomputed")
    return f"Path patching, {effects.key['direction']}{recomputed}"


def describe_methods(effects: Effects, nouns: str) -> str:
    """Text with the number of units that were patched exactly and estimated; `nouns` says what they are."""
    exact, units = int(effects.is_exact.sum()), len(effects.units)
    if exact == units:
        return f"all {exact:,} {nouns} patched exactly"
    if not exact:
        return f"{units:,} {nouns} estimated"
    return f"{exact:,} of {units:,} {nouns} patched exactly, the others estimated"


def path_name(path: pd.Series) -> str:
    """Name of a path: "L23H3 to v of L29H1", "L23H3@last to the logits" with the positions of the sender."""
    sender_at, receiver_at = (
        "" if path[f"{end}_positions"] == ALL_TOKENS else f"@{path[f'{end}_positions']}"
        for end in ("sender", "receiver")
    )
    sender = format_head(path["sender_layer"], path["sender_head"]) + sender_at
    if path["receiver_layer"] == LOGITS:
        return f"{sender} to the logits"
    if path["receiver_layer"] == TOGETHER:
        return f"{sender} to {path['through']} of the named receivers together{receiver_at and f' ({receiver_at})'}"
    receiver = format_head(path["receiver_layer"], path["receiver_head"])
    return f"{sender} to {path['through']} of {receiver}{receiver_at}"
