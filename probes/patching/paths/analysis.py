"""Analysis of path patches: mean effects over pairs with intervals, and agreement of estimates with exact effects.

Every mean is over the pairs whose metric differs enough between the clean and the corrupted prompt. A path counts as
exact if it was patched, else as estimated.
"""

from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.aggregation import confidence_interval, plain_types
from headscope.runs.run_tables import RunTables
from probes.patching.analysis import adjusted_p_values, order_of_models, t_test
from probes.patching.paths.schema import PATH_ESTIMATES, PATH_KEYS, PATHS

SWEEP_KEYS = ["model", "prompts", "metric", "direction", "norms"]
"""Keys of one sweep over paths."""
PATH_COLUMNS = [column.name for column in PATH_KEYS]
SweepKey = tuple[str, str, str, str, str]
"""(model, prompts, metric, direction, norms)."""


def path_effects(run: RunTables) -> pd.DataFrame:
    """One row per path of every sweep: `effect` (mean over pairs), `low` and `high` (95 % interval), `pairs`, `method`,
    `estimate`, `p` and `p_adjusted` (two-sided t-test of 0; Benjamini-Hochberg over all paths of the sweep, those that
    were only estimated with p = 1, because the estimates selected the others).

    An interval and p are NaN for estimates and below three pairs; `estimate` is NaN for a path without one.
    """
    keys = [*SWEEP_KEYS, *PATH_COLUMNS]
    exact, estimated = _exact_effects(run), _estimates(run)
    paths = estimated.merge(exact, how="outer", on=keys, suffixes=("_estimated", ""))
    paths = paths.astype({name: int for name in PATH_COLUMNS if name != "through"})
    is_exact = paths["effect"].notna()
    paths["method"] = np.where(is_exact, "exact", "estimate")
    paths["effect"] = paths["effect"].fillna(paths["estimate"])
    paths["pairs"] = paths["pairs"].fillna(paths.pop("pairs_estimated")).astype(int)
    paths["p_adjusted"] = paths.groupby(SWEEP_KEYS, sort=False)["p"].transform(adjusted_p_values)
    return paths.sort_values(keys, key=order_of_models(run), ignore_index=True)


def sweeps(run: RunTables) -> list[tuple[SweepKey, pd.DataFrame]]:
    """The sweeps of a run with their `path_effects`, in the order of the run's models."""
    groups: Any = run.derived(path_effects).groupby(SWEEP_KEYS, sort=False)
    return [(key, paths.reset_index(drop=True)) for key, paths in groups]


def decisive_paths(paths: pd.DataFrame) -> pd.DataFrame:
    """The exact paths of a sweep, or all if every path was only estimated."""
    exact = paths[paths["method"] == "exact"]
    return exact if len(exact) else paths


def strongest_paths(paths: pd.DataFrame, count: int) -> pd.DataFrame:
    """The decisive paths of largest |effect|, strongest first."""
    decisive = decisive_paths(paths)
    return decisive.loc[decisive["effect"].abs().sort_values(ascending=False, kind="stable").index[:count]]


def _exact_effects(run: RunTables) -> pd.DataFrame:
    """Mean effect, interval, p and pairs of every patched path."""
    columns = [*SWEEP_KEYS, *PATH_COLUMNS, "effect", "low", "high", "p", "pairs"]
    rows = plain_types(run.table(PATHS.name)) if PATHS.name in run.tables else pd.DataFrame()
    rows = rows[rows["is_normalised"]] if len(rows) else rows
    if rows.empty:
        return _empty(columns)
    blocks = []
    groups: Any = rows.groupby(SWEEP_KEYS, sort=False)
    for key, block in groups:
        table = block.pivot_table(index=PATH_COLUMNS, columns="pair", values="effect")
        values = table.to_numpy(dtype=np.float64)
        low, high = confidence_interval(values)
        results = {"effect": values.mean(axis=1), "low": low, "high": high, "p": t_test(values)}
        frame = pd.DataFrame({**results, "pairs": values.shape[1]}, index=table.index).reset_index()
        blocks.append(frame.assign(**dict(zip(SWEEP_KEYS, key, strict=True))))
    return pd.concat(blocks, ignore_index=True)[columns]


def _estimates(run: RunTables) -> pd.DataFrame:
    """The mean estimate of every path."""
    columns = [*SWEEP_KEYS, *PATH_COLUMNS, "estimate", "pairs"]
    if PATH_ESTIMATES.name not in run.tables:
        return _empty(columns)
    return plain_types(run.table(PATH_ESTIMATES.name)).rename(columns={"effect": "estimate"})[columns]


def _empty(columns: list[str]) -> pd.DataFrame:
    """An empty frame with the types of these columns."""
    numbers = {*PATH_COLUMNS, "effect", "low", "high", "p", "pairs", "estimate"} - {"through"}
    return pd.DataFrame({name: pd.Series(dtype=float if name in numbers else "str") for name in columns})
