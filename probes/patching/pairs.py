"""The pairs of a run of activation patching: their metrics, and which of them count."""

import pandas as pd

from headscope.effects.prompts import prompts_that_count
from headscope.runs.aggregation import plain_types
from headscope.runs.run_tables import RunTables
from probes.patching.schema import PATCHING, PATCHING_LAYERS


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
