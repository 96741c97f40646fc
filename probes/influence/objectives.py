"""Rows of either objective in one shape: of each text, a document or a trial, what a change adds to its loss."""

from collections.abc import Iterable

import pandas as pd

from headscope.runs.aggregation import plain_types
from headscope.runs.run_tables import RunTables
from probes.influence.tables import SET_TABLES, UNIT_TABLES

TEXT_NOUNS = {"text": "document", "answer": "trial"}
"""What a loss is of."""


def with_objective(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `objective`. Of answers, `doc` names the trial and `context_length` is the longest of the model's
    grid, all of which is one sweep."""
    if "objective" in rows:
        return rows
    if "fact" not in rows:
        return rows.assign(objective="text")
    rows = plain_types(rows)
    trial = ["doc", "fact", "depth", "context_length"]
    named = rows[trial].drop_duplicates()
    named["trial"] = [
        f"{doc}, {fact} at {depth:.0%} of {length:,}" for doc, fact, depth, length in named.itertuples(index=False)
    ]
    name = rows.merge(named, on=trial, how="left")["trial"].to_numpy()
    longest = rows.groupby("model")["context_length"].transform("max")
    return rows.assign(objective="answer", doc=name, context_length=longest).drop(columns=["fact", "depth"])


def read_unit_rows(run: RunTables) -> pd.DataFrame | None:
    """What the run stores of single units, of both objectives; None without any."""
    return _read_tables(run, UNIT_TABLES.values())


def read_set_rows(run: RunTables) -> pd.DataFrame | None:
    """The same of sets of units."""
    return _read_tables(run, SET_TABLES.values())


def _read_tables(run: RunTables, table_names: Iterable[str]) -> pd.DataFrame | None:
    found = [with_objective(run.table(name)) for name in table_names if name in run.tables]
    if len(found) < 2:
        return found[0] if found else None
    return pd.concat(map(plain_types, found), ignore_index=True)
