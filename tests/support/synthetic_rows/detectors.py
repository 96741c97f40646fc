"""Synthetic rows of the detectors probe."""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.detectors.declaration import TARGETS

SAMPLE_SEQUENCES = 8


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Cells of random scores; each kind has its heads at another growth exponent."""
    rng = np.random.default_rng([sizes.seed, model_index])
    grid = pd.DataFrame(
        list(product(sizes.lengths, range(SAMPLE_SEQUENCES), TARGETS)),
        columns=["context_length", "sequence", "kind"],
    )
    table = sizes.units.merge(grid, how="cross").assign(model=model)
    growth = table["kind"].map({"previous": 0.0, "current": 0.2, "first": 0.9, "duplicate": 0.4, "induction": 0.1})
    noise = rng.normal(0, 0.02, len(table))
    table["score"] = np.clip(0.9 - 4 * (table["growth"] - growth).abs() + noise, 0.001, 1)
    is_second_half = table["kind"].isin(["duplicate", "induction"])
    table["rows"] = np.where(is_second_half, table["context_length"] // 2, table["context_length"])
    table["chance"] = np.log(table["context_length"]) / table["context_length"]
    yield "scores", {"detectors": table.drop(columns="growth")}
    shortest = table[table["context_length"] == min(sizes.lengths)].rename(columns={"sequence": "prompt"})
    of_prompts = shortest.assign(tokens=shortest["context_length"]).drop(columns=["growth", "context_length"])
    yield "prompts", {"prompt_detectors": of_prompts}
