"""Runs with plausible numbers in the tables of the built-in probes, and random ones in those of others."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes, measure_rows, position_rows, synthetic_manifest
from headscope.base import plugins
from headscope.run import Run
from headscope.runs.columns import Table, all_tables
from headscope.runs.writer import RunWriter
from support.declared_rows import declared_rows
from support.synthetic_rows import ROWS

ON_REQUEST = {"circuit", "sparsity", "spans"}
"""Probes that are in a run only if a test names them: two have prompts of their own, one many charts."""


def synthetic_run(
    out: Path,
    models: Sequence[str] = ("base", "yarn"),
    *,
    probes: Collection[str] = (),
    lengths: Sequence[int] = (256, 1024),
    randomised: bool = False,
    **sizes: int,
) -> Run:
    """Write a run under `out` with the tables of these probes; `sizes` are fields of Sizes.

    `randomised`: the measured values of each table are drawn again by the seed, see `_randomise`.

    Default: every probe with plausible rows. A named probe without them gets random rows of its declared tables.
    """
    size = Sizes(**sizes, lengths=tuple(lengths))
    config: dict[str, Any] = {"models": [*models], **asdict(size), "probes": [*probes], "randomised": randomised}
    names = tuple(name for name in plugins.requestable_probes() if name in (probes or {"measure", *ROWS} - ON_REQUEST))
    with RunWriter.open(out, "synthetic", config) as writer:  # one job, since each costs several writes to the disk
        tables = _tables(size, tuple(models), names)
        if randomised:
            rng = np.random.default_rng(size.seed)
            tables = {name: _randomise(rows, all_tables()[name], rng) for name, rows in tables.items()}
        writer.add("all", tables)
        return Run.open(writer.commit(["all"], synthetic_manifest(models, size.layers, size.heads, size.groups)).path)


def _randomise(rows: pd.DataFrame, table: Table, rng: np.random.Generator) -> pd.DataFrame:
    """The rows with the numbers of one, of three or of many random rows, at a random size and, where a column allows
    it, with a random sign."""
    if rows.empty:
        return rows
    donors = rng.integers(len(rows), size=rng.choice([1, 3, len(rows)]))
    drawn = rows.iloc[rng.choice(donors, len(rows))].reset_index(drop=True)
    signs = rng.choice([-1, 1], len(rows)) if rng.random() < 0.5 else rng.choice([-1, 1])
    for column in table.columns:
        is_measured = column.kind == "value" or column.name == "success"  # other flags say which rows count
        if column.key or column.name not in rows or not is_measured:
            continue
        values = drawn[column.name].to_numpy()
        if (column.low, column.high) == (0, 1):
            values = values**2 ** rng.uniform(-4, 1)
        elif (column.low, column.high) in ((None, None), (None, 0), (0, None)):
            values = values * rng.uniform(0.2, 20) * (signs if column.low is column.high is None else 1)
        rows = rows.assign(**{column.name: values})
    return rows


@lru_cache(maxsize=32)
def _tables(sizes: Sizes, models: tuple[str, ...], probes: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    """Tests often write a run of the same tables, each to a folder of its own."""
    blocks: dict[str, list[pd.DataFrame]] = {}
    for number, model in enumerate(models):
        cells = [position_rows(sizes, model, number), *(_probe_tables(sizes, number, probe) for probe in probes)]
        for tables in cells:
            for name, rows in tables.items():
                blocks.setdefault(name, []).append(rows.assign(model=model) if "model" in rows else rows)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in blocks.items()}


@lru_cache(maxsize=256)
def _probe_tables(sizes: Sizes, number: int, probe: str) -> dict[str, pd.DataFrame]:
    """The tables of a probe about the model with this number, which has no label yet."""
    if probe == "measure":
        cells = [*measure_rows(sizes, "", number)]
    elif probe in ROWS:
        cells = [tables for _, tables in ROWS[probe](sizes, "", number)]
    else:
        declared = plugins.probes()[probe].tables()
        cells = [{table.name: declared_rows(table, sizes, "", number) for table in declared}]
    blocks: dict[str, list[pd.DataFrame]] = {}
    for tables in cells:
        for name, columns in tables.items():
            blocks.setdefault(name, []).append(pd.DataFrame(columns))
    return {name: pd.concat(frames, ignore_index=True) for name, frames in blocks.items()}
