"""Rows of both objectives in one shape, and damped estimates for units that were not evaluated.

The second-order term of an estimate is accurate while it is small and too large by factors when it is large, because
layer norms bound the effect of an upstream change; so the damped estimate saturates it [ours].
"""

from collections.abc import Iterable

import pandas as pd

from headscope.effects.sweep import Sweep
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.run_tables import RunTables
from probes.influence.schema import SET_TABLES, UNIT_TABLES

TEXT_NOUNS = {"text": "document", "answer": "trial"}
"""Noun for one text, by objective."""
SATURATION_FACTOR = 2.0
"""Saturation of the second-order term, in mean absolute first-order estimates of the text's sweep [ours]."""
ESTIMATE_KEYS = ["model", "context_length", "doc", "fact", "depth", "component", "target", "layer", "kv_group", "head"]
SWEEP = Sweep(
    keys=("model", "context_length", "intervention", "target", "objective"),
    sample="doc",
    value="delta_nll",
    methods=("exact", "damped", "second-order", "estimate"),
)
"""One change of every unit of a model. The intervention is the component in the tables."""


def with_objective(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `objective`. For answers, `doc` names the trial and `context_length` is the longest of the
    model's grid, because the grid is one sweep."""
    if "objective" in rows:
        return rows
    if "fact" not in rows:
        return rows.assign(objective="text")
    rows = plain_types(rows)
    trial = ["doc", "fact", "depth", "context_length"]
    trials = rows[trial].drop_duplicates()
    trials["trial"] = [
        f"{doc}, {fact} at {100 * depth:.0f} % of {length:,} tokens"
        for doc, fact, depth, length in trials.itertuples(index=False)
    ]
    names = rows.merge(trials, on=trial, how="left")["trial"].to_numpy()
    longest = rows.groupby("model")["context_length"].transform("max")
    return rows.assign(objective="answer", doc=names, context_length=longest).drop(columns=["fact", "depth"])


def read_unit_rows(run: RunTables) -> pd.DataFrame | None:
    """The run's rows of single units, of both objectives; None if there are none."""
    return _read_tables(run, UNIT_TABLES.values())


def read_set_rows(run: RunTables) -> pd.DataFrame | None:
    """The run's rows of sets of units, of both objectives; None if there are none."""
    return _read_tables(run, SET_TABLES.values())


def _read_tables(run: RunTables, table_names: Iterable[str]) -> pd.DataFrame | None:
    blocks = [with_objective(run.table(name)) for name in table_names if name in run.tables]
    if len(blocks) < 2:
        return blocks[0] if blocks else None
    return pd.concat(map(plain_types, blocks), ignore_index=True)


def longest_rows(influence: pd.DataFrame) -> pd.DataFrame:
    """The rows of `SWEEP` at the longest length of each model and objective, with damped estimates."""
    rows = rows_at_longest_length(with_objective(plain_types(influence)), ["model", "objective"])
    return add_damped_estimates(rows).rename(columns={"component": "intervention"})


def add_damped_estimates(influence: pd.DataFrame) -> pd.DataFrame:
    """The rows, plus one of method `damped` for every unit and text that has both `estimate` and `second-order`.

    first + added / (1 + |added| / scale), in nats/token, with first = estimate, added = second-order - estimate and
    scale twice the mean |first| over the units of the text's sweep. The table may lack some of the keys.
    """
    unit = [name for name in ESTIMATE_KEYS if name in influence]
    rows = influence.astype({"method": "str", "delta_nll": "float64"})
    first, second = (rows[rows["method"] == method].set_index(unit) for method in ("estimate", "second-order"))
    added = (second["delta_nll"] - first["delta_nll"]).dropna()
    if added.empty:
        return rows
    base = first.loc[added.index]
    sweep = [name for name in unit if name not in ("layer", "kv_group", "head")]
    scale = SATURATION_FACTOR * base["delta_nll"].abs().groupby(level=sweep, observed=True).transform("mean")
    size = (added.abs() / scale).fillna(0)  # 0 / 0 if the whole sweep has no effect
    damped = base.assign(method="damped", delta_nll=base["delta_nll"] + added / (1 + size))
    return pd.concat([rows, damped.reset_index()], ignore_index=True)
