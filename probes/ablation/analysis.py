"""Analysis of ablations: effects of every head over prompts, and columns of the per-head table.

Means are over the prompts that count (`is_counted`) in every model.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pandas as pd

from headscope.ablation_names import column_part, describe_ablation
from headscope.effects.prompts import rows_that_count, subset_sweeps
from headscope.effects.sweep import Effects, Sweep, sweep_effects
from headscope.effects.units import head_columns
from headscope.runs.aggregation import plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.ablation.schema import ABLATION, ABLATION_SETS, KINDS, POSITIONS_MARK

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"ablation_{column_part(kind)}": Statistic(
            f"{describe_ablation(kind)} on prompts",
            "logits or nats",
            f"change of the answer's metric under {describe_ablation(kind)} of the head at all positions, "
            "mean over the prompts of all sets that count in every model (is_counted)",
            number_format="+.3g",
        )
        for kind in KINDS
    }
)
SWEEP = Sweep(keys=("model", "prompts", "metric", "intervention"), sample="pair", value="change")
"""Ablations of single heads. The intervention is the kind of ablation."""
SET_SWEEP = replace(SWEEP, units=("size",))
"""Ablations of all named heads together."""


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns `ablation_<kind>` by (model, layer, head, kv_group), each with its confidence interval over prompts.

    Ablations at some positions have none.
    """
    if ABLATION.name not in run.tables:
        return None
    rows = counted_rows(run.table(ABLATION.name))
    rows = rows[~rows["intervention"].str.contains(POSITIONS_MARK, regex=False)]
    if rows.empty:
        return None
    kinds = rows["intervention"].unique()
    windows = [kind for kind in kinds if kind.startswith("streaming:")]
    names = {kind: column_part(kind) for kind in kinds} | ({windows[0]: "streaming"} if len(windows) == 1 else {})
    rows = rows.assign(doc=rows["prompts"] + "/" + rows["pair"], column="ablation_" + rows["intervention"].map(names))
    return head_columns(run, rows, SWEEP)


def sweeps(run: RunTables) -> list[Effects]:
    """Every sweep of single heads."""
    return sweep_effects(counted_rows(run.table(ABLATION.name)), SWEEP, run.models)


def prompt_sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of single heads in every prompt that has results of its own."""
    return subset_sweeps(counted_rows(run.table(ABLATION.name)), SWEEP, run.models)


def set_sweeps(run: RunTables, is_control: bool = False) -> list[Effects]:
    """Every sweep of the named heads together, or of random heads (mean over the sets of a prompt), as one unit."""
    rows = counted_rows(run.table(ABLATION_SETS.name))
    return sweep_effects(rows[(rows["draw"] > 0) == is_control], SET_SWEEP, run.models)


def counted_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that count with `change`, metric after minus before, and the kind of ablation as `intervention`."""
    rows = rows_that_count(table).rename(columns={"kind": "intervention"})
    return rows.assign(change=rows["metric_after"] - rows["metric_before"])


def prompt_metrics(run: RunTables) -> pd.DataFrame:
    """One row per prompt of every model and set: model, prompts, metric, pair, is_counted, and `metric_clean` of the
    unchanged run."""
    keys = ["model", "prompts", "metric", "pair"]
    rows = run.table(ABLATION.name)[[*keys, "metric_before", "is_counted"]].drop_duplicates(keys)
    return plain_types(rows).rename(columns={"metric_before": "metric_clean"})
