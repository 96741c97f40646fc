"""Columns of the per-head table from the rows of a sweep."""

from typing import Any

import pandas as pd

from headscope.effects.sweep import Sweep
from headscope.runs.aggregation import HEAD_KEYS, group_members, mean_with_interval, with_method
from headscope.runs.run_tables import RunTables


def head_columns(run: RunTables, rows: pd.DataFrame, sweep: Sweep) -> pd.DataFrame:
    """One column for each value of `column` by (model, layer, head, kv_group): the mean over samples with its interval
    and, if the sweep has estimates, its method: exact; that of the estimates, which has no interval; or mixed.

    `rows` have one method per unit (`best_method_rows`), and `doc`, which names the sample of the mean. Every head of a
    KV group has the effect of the group.
    """
    rows = rows.merge(group_members(run.manifest["models"]), on=["model", "layer", "kv_group"])
    rows = rows[(rows["head"] < 0) | (rows["head"] == rows["member"])].assign(head=lambda frame: frame["member"])
    groups: Any = rows.groupby("column", sort=False)
    blocks = []
    for name, block in groups:
        means = mean_with_interval(block.set_index([*HEAD_KEYS, "doc"])[sweep.value], str(name))
        has_estimates = len(sweep.methods) > 1
        blocks.append(with_method(means, block.set_index(HEAD_KEYS)["method"]) if has_estimates else means)
    return pd.concat(blocks, axis=1)
