"""Analysis of ablations: effects of every head over prompts, and columns of the per-head table."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pandas as pd

from headscope.ablation_names import column_part, describe_ablation
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
            "mean over the prompts of all sets",
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
    rows = with_change(run.table(ABLATION.name))
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
    return sweep_effects(with_change(run.table(ABLATION.name)), SWEEP, run.models)


def set_sweeps(run: RunTables, is_control: bool = False) -> list[Effects]:
    """Every sweep of the named heads together, or of random heads (mean over the sets of a prompt), as one unit."""
    rows = with_change(run.table(ABLATION_SETS.name))
    return sweep_effects(rows[(rows["draw"] > 0) == is_control], SET_SWEEP, run.models)


def with_change(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with `change`, metric after minus metric before, and with the kind of ablation as `intervention`."""
    rows = plain_types(table).rename(columns={"kind": "intervention"})
    return rows.assign(change=rows["metric_after"] - rows["metric_before"])


def prompt_metrics(run: RunTables) -> dict[tuple[str, str, str], pd.Series]:
    """The metric of the unchanged run of every prompt, by (model, prompts, metric)."""
    keys = ["model", "prompts", "metric"]
    rows = plain_types(run.table(ABLATION.name)[[*keys, "pair", "metric_before"]].drop_duplicates([*keys, "pair"]))
    groups: Any = rows.groupby(keys, sort=False)
    return {key: group.set_index("pair")["metric_before"] for key, group in groups}
