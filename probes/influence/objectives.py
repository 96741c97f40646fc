"""Rows of either objective in one shape: of each text, a document or a trial, what a change adds to its loss."""

from collections.abc import Iterable

import pandas as pd

from headscope.runs.aggregation import plain
from headscope.runs.run_tables import RunTables
from probes.influence.tables import OF_SETS, OF_UNITS

NOUNS = {"text": "document", "answer": "trial"}
"""What a loss is of."""


def by_text(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `objective`. Of answers, `doc` names the trial and `context_length` is the longest of the model's
    grid, all of which is one sweep."""
    if "objective" in rows:
        return rows
    if "fact" not in rows:
        return rows.assign(objective="text")
    rows = plain(rows)
    trial = ["doc", "fact", "depth", "context_length"]
    named = rows[trial].drop_duplicates()
    named["trial"] = [
        f"{doc}, {fact} at {depth:.0%} of {length:,}" for doc, fact, depth, length in named.itertuples(index=False)
    ]
    name = rows.merge(named, on=trial, how="left")["trial"].to_numpy()
    longest = rows.groupby("model")["context_length"].transform("max")
    return rows.assign(objective="answer", doc=name, context_length=longest).drop(columns=["fact", "depth"])


def of_units(run: RunTables) -> pd.DataFrame | None:
    """What the run stores of single units, of both objectives; None without any."""
    return _joined(run, OF_UNITS.values())


def of_sets(run: RunTables) -> pd.DataFrame | None:
    """The same of sets of units."""
    return _joined(run, OF_SETS.values())


def _joined(run: RunTables, names: Iterable[str]) -> pd.DataFrame | None:
    found = [by_text(run.table(name)) for name in names if name in run.tables]
    if len(found) < 2:
        return found[0] if found else None
    return pd.concat(map(plain, found), ignore_index=True)
