"""Write small synthetic runs cell by cell."""

import numpy as np

from benchmarks.synthetic_run import synthetic_manifest
from headscope.runs.writer import RunWriter

CONFIG = {"models": {"base": "tiny"}, "docs": 4}
CELLS = [f"base/{doc}" for doc in range(4)]


def rows(cell):
    """Rows of two tables, of which `distance` has the same keys in every cell."""
    rng = np.random.default_rng(CELLS.index(cell))
    unit = {"model": "base", "context_length": 32, "layer": 0, "head": 1, "kv_group": 0}
    distance = {"pair": 0, "distance": [0, 1, 2], "mean_signed": rng.normal(size=3), "n": [32, 31, 30]}
    return {
        "nll": {
            "model": "base",
            "context_length": 32,
            "doc": cell,
            "position": [16, 31],
            "nll": 2.5,
            "tokens": [16, 15],
        },
        "distance": {**unit, **distance},
    }


def study(out, config=CONFIG, resume=False, cells=CELLS):
    with RunWriter.open(out, "test", config, resume) as writer:
        for cell in cells:
            if not writer.is_done(cell):
                writer.add(cell, rows(cell))
        return writer.commit(CELLS, synthetic_manifest(["base"]))


def contents(run):
    return {file.name: file.read_bytes() for file in sorted(run.path.glob("*.parquet"))}


def interrupted(out, cells=CELLS[:2], config=CONFIG):
    with RunWriter.open(out, "test", config) as writer:
        for cell in cells:
            writer.add(cell, rows(cell))
    (partial,) = out.glob(".test-*.partial")
    return partial
