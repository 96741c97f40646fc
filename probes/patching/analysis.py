"""Analysis of patches: effects of every unit over pairs, effects by span and position, columns of the per-head table.

Every effect is over the pairs that count (`is_counted`) in every model of the run, so that those of models can be
compared: the mean change of the metric divided by its mean difference between the prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pandas as pd

from headscope.effects.prompts import by_subset, rows_that_count, with_subsets
from headscope.effects.sweep import Effects, Sweep, best_method_rows, sweep_effects
from headscope.effects.units import head_columns
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.patching.pairs import pairs_usable_in_all_models
from probes.patching.schema import (
    ACTIVATION_LABELS,
    ALL_POSITIONS,
    PATCHING,
    PATCHING_LAYERS,
    PATCHING_SETS,
    PATCHING_SPANS,
)

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
