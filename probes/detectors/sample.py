"""Made-up scores of the detectors, for tests and timings: heads of low growth look at the token before."""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes
from probes.detectors.analysis import KIND_COLUMNS

SAMPLE_SEQUENCES = 8


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Scores of sequences as long as each context, by the model of that number, as one cell."""
    rng = np.random.default_rng([sizes.seed, model_index])
    grid = pd.DataFrame(
        list(product(sizes.lengths, range(SAMPLE_SEQUENCES), KIND_COLUMNS)), columns=["context_length", "sequence", "kind"]
    )
    table = sizes.units.merge(grid, how="cross").assign(model=model)
    fits = table["kind"].map({"previous": 0.0, "current": 0.2, "first": 0.9, "duplicate": 0.4, "induction": 0.1})
    noise = rng.normal(0, 0.02, len(table))
    table["score"] = np.clip(0.9 - 4 * (table["growth"] - fits).abs() + noise, 0.001, 1)
    second = table["kind"].isin(["duplicate", "induction"])
    table["rows"] = np.where(second, table["context_length"] // 2, table["context_length"])
    table["chance"] = np.log(table["context_length"]) / table["context_length"]
    yield "scores", {"detectors": table.drop(columns="growth")}
