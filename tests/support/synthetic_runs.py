"""Runs with plausible numbers in the tables of the built-in probes, and random ones in those of others."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from headscope import plugins
from headscope.bench.synthetic_run import Sizes, measure_rows, position_rows, synthetic_manifest
from headscope.runs.run import Run
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
    **sizes: int,
) -> Run:
    """Write a run under `out` with the tables of these probes; `sizes` are fields of Sizes.

    Default: every probe with plausible rows. A named probe without them gets random rows of its declared tables.
    """
    size = Sizes(**sizes, lengths=tuple(lengths))
    config: dict[str, Any] = {"models": [*models], **asdict(size), "probes": [*probes]}
    names = tuple(name for name in plugins.requestable_probes() if name in (probes or {"measure", *ROWS} - ON_REQUEST))
    with RunWriter.open(out, "synthetic", config) as writer:  # one job, since each costs several writes to the disk
        writer.add("all", _tables(size, tuple(models), names))
        return writer.commit(["all"], synthetic_manifest(models, size.layers, size.heads, size.groups))


@lru_cache(maxsize=32)
def _tables(sizes: Sizes, models: tuple[str, ...], probes: tuple[str, ...]) -> dict[str, pd.DataFrame]:
    """Tests often write a run of the same tables, each to a folder of its own."""
    blocks: dict[str, list[pd.DataFrame]] = {}
    for number, model in enumerate(models):
        cells = [position_rows(sizes, model, number)]
        for probe in probes:
            if probe == "measure":
                cells += measure_rows(sizes, model, number)
            elif probe in ROWS:
                cells += [tables for _, tables in ROWS[probe](sizes, model, number)]
            else:
                tables_of_probe = plugins.probes()[probe].tables()
                cells += [{table.name: declared_rows(table, sizes, model, number) for table in tables_of_probe}]
        for tables in cells:
            for name, columns in tables.items():
                blocks.setdefault(name, []).append(pd.DataFrame(columns))
    return {name: pd.concat(frames, ignore_index=True) for name, frames in blocks.items()}
