"""Table of the detectors probe: mean weight of every head on each kind of key, by sequence; and synthetic rows of
it."""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.columns import GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.synthetic import Sizes
from probes.detectors.analysis import KIND_COLUMNS

DETECTORS = Table(
    "detectors",
    "mean weight of each head on each kind of key, on a repeated random token sequence",
    (
        MODEL,
        LENGTH,
        key("sequence", "index32", "", "number of the random sequence; the same for all models with one tokenizer"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "key of query row i, in a random sequence of m tokens that is repeated once: previous i - 1, current i, "
            "first 0; in the second half also duplicate i - m and induction i - m + 1. Omitted if no row of the layer "
            "sees such a key, e.g. if the layer's window is shorter than m",
            None,
        ),
        Column("score", "value", "", "mean weight on that key over the rows that see it", 0, 1),
        Column("chance", "value", "", "the score of uniform weights: mean of 1 / visible keys", 0, 1),
        Column("rows", "count", "rows", "query rows in the mean", 1),
    ),
)

TABLES = (DETECTORS,)

SAMPLE_SEQUENCES = 8


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell of random scores; each kind has its heads at another growth exponent."""
    rng = np.random.default_rng([sizes.seed, model_index])
    grid = pd.DataFrame(
        list(product(sizes.lengths, range(SAMPLE_SEQUENCES), KIND_COLUMNS)),
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
