"""Analysis of path patches: mean effects over pairs with intervals, and agreement of estimates with exact effects.

Every mean is over the pairs whose metric differs enough between the clean and the corrupted prompt. A path counts as
exact if it was patched, else as estimated.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.aggregation import adjust_p_values, confidence_interval, t_test
from headscope.runs.run_tables import RunTables
from probes.patching.analysis import exact_or_all
from probes.patching.paths.schema import LOGITS, PATH_ENDS, PATH_ESTIMATES, PATH_KEYS, PATHS

SWEEP_KEYS = ["model", "prompts", "metric", "direction", "norms"]
"""Keys of one sweep over paths."""
PATH_COLUMNS = [column.name for column in PATH_KEYS]
*LAYER_AND_HEAD_COLUMNS, _ = PATH_COLUMNS
"""The layers and heads of a path; its last column is `through`."""
MAX_LAYER_OR_HEAD = 1 << 15
"""Upper bound of layer and head numbers, which are stored in 16 bits."""
SORTED_PATH_ENDS = sorted(PATH_ENDS)
SweepKey = tuple[str, str, str, str, str]
"""(model, prompts, metric, direction, norms)."""


def sweeps(run: RunTables) -> list[tuple[SweepKey, pd.DataFrame]]:
    """The sweeps of a run in the order of its models; see `sweeps_of_model`."""
    return [sweep for model in run.models for sweep in run.derived(sweeps_of_model, model)]


def sweeps_of_model(run: RunTables, model: str) -> list[tuple[SweepKey, pd.DataFrame]]:
    """The sweeps of a model with one row per path, in the order of the path's columns.

    Columns: those of `PATH_COLUMNS`, `effect` (mean over pairs), `low` and `high` (95 % interval), `pairs`, `method`,
    `estimate`, `p` and `p_adjusted` (two-sided t-test of 0; Benjamini-Hochberg over all paths of the sweep, those that
    were only estimated with p = 1, because the estimates selected the others).

    An interval and p are NaN for estimates and below three pairs; `estimate` is NaN for a path without one.
    """
    exact, estimated = (_rows_by_sweep(run, table, model) for table in (PATHS.name, PATH_ESTIMATES.name))
    keys = sorted({*exact, *estimated})
    return [(key, _path_effects(exact.get(key), estimated.get(key))) for key in keys]


def _rows_by_sweep(run: RunTables, table: str, model: str) -> dict[SweepKey, pd.DataFrame]:
    if table not in run.tables:
        return {}
    rows = run.table(table)
    is_counted = rows["model"] == model
    if "is_normalised" in rows:
        is_counted &= rows["is_normalised"]
    groups: Any = rows[is_counted].groupby(SWEEP_KEYS, sort=False, observed=True)
    return dict(iter(groups))


def _path_effects(exact_rows: pd.DataFrame | None, estimate_rows: pd.DataFrame | None) -> pd.DataFrame:
    """One row per path of a sweep; there may be millions of estimates, so paths are joined by one number each."""
    exact, estimated = _exact_effects(exact_rows), _estimates(estimate_rows)
    paths = estimated.join(exact, how="outer").sort_index()
    is_exact = paths["effect"].notna()
    paths["method"] = pd.Categorical.from_codes(is_exact.to_numpy().astype(np.int8), pd.Index(["estimate", "exact"]))
    paths["effect"] = paths["effect"].fillna(paths["estimate"])
    paths["pairs"] = paths["pairs"].fillna(paths.pop("pairs_estimated")).astype(int)
    paths["p_adjusted"] = adjust_p_values(paths["p"])
    return _path_columns(paths.index.to_numpy()).join(paths.reset_index(drop=True))


def strongest_paths(paths: pd.DataFrame, count: int) -> pd.DataFrame:
    """The paths of largest |effect|, strongest first, of the exact ones if there are any."""
    candidates = exact_or_all(paths)
    return candidates.loc[candidates["effect"].abs().sort_values(ascending=False, kind="stable").index[:count]]


def _exact_effects(rows: pd.DataFrame | None) -> pd.DataFrame:
    """Mean effect, interval, p and pairs of every patched path of a sweep, by path number."""
    if rows is None:
        return pd.DataFrame(columns=["effect", "low", "high", "p", "pairs"], dtype=np.float64)
    numbered = pd.DataFrame({"path": _path_numbers(rows), "pair": rows["pair"].astype("str"), "effect": rows["effect"]})
    table = numbered.pivot_table(index="path", columns="pair", values="effect")
    values = table.to_numpy(dtype=np.float64)
    low, high = confidence_interval(values)
    results = {"effect": values.mean(axis=1), "low": low, "high": high, "p": t_test(values)}
    return pd.DataFrame({**results, "pairs": values.shape[1]}, index=table.index)


def _estimates(rows: pd.DataFrame | None) -> pd.DataFrame:
    """The mean estimate of every path of a sweep, and the number of its pairs, by path number."""
    if rows is None:
        return pd.DataFrame(columns=["estimate", "pairs_estimated"], dtype=np.float64)
    columns = {"estimate": rows["effect"].to_numpy(np.float64), "pairs_estimated": rows["pairs"].to_numpy()}
    return pd.DataFrame(columns, index=_path_numbers(rows))


def _path_numbers(rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Encode each path as one integer. The integers sort like the columns of the paths."""
    numbers = np.zeros(len(rows), np.int64)
    for name in LAYER_AND_HEAD_COLUMNS:
        numbers = numbers * MAX_LAYER_OR_HEAD + rows[name].to_numpy(np.int64) - LOGITS
    ends = rows["through"].cat
    ranks = np.array([SORTED_PATH_ENDS.index(name) for name in ends.categories], np.int64)
    return np.asarray(numbers * len(SORTED_PATH_ENDS) + ranks[ends.codes.to_numpy()])


def _path_columns(numbers: npt.NDArray[np.int64]) -> pd.DataFrame:
    """The columns of the paths of these numbers."""
    numbers, end_codes = np.divmod(numbers, len(SORTED_PATH_ENDS))
    columns: dict[str, Any] = {"through": pd.Categorical.from_codes(end_codes, pd.Index(SORTED_PATH_ENDS))}
    for name in reversed(LAYER_AND_HEAD_COLUMNS):
        numbers, number = np.divmod(numbers, MAX_LAYER_OR_HEAD)
        columns[name] = number + LOGITS
    return pd.DataFrame({name: columns[name] for name in PATH_COLUMNS})
