"""Options, stored table and synthetic rows of the detectors probe."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field

from headscope.runs.arrow import Rows
from headscope.runs.columns import GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.synthetic import Sizes
from headscope.study.config import Options, sorted_lengths
from probes.detectors.analysis import KIND_COLUMNS

MIN_PERIOD = 8
"""For shorter periods the chance level is high and the kinds of key overlap."""

MAX_PERIOD = 2**20
"""A forward pass over two periods must fit into memory."""


class DetectorsOptions(Options):
    """Heads that attend to the previous token, a duplicate or the token after it, on a repeated random token
    sequence."""

    periods: Annotated[list[Annotated[int, Field(le=MAX_PERIOD)]], sorted_lengths(MIN_PERIOD, "period")] = Field(
        default=[128, 512], description="length of the repeated random token sequence; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences per period")


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
    table = sizes.heads.merge(grid, how="cross").assign(model=model)
    growth = table["kind"].map({"previous": 0.0, "current": 0.2, "first": 0.9, "duplicate": 0.4, "induction": 0.1})
    noise = rng.normal(0, 0.02, len(table))
    table["score"] = np.clip(0.9 - 4 * (table["growth"] - growth).abs() + noise, 0.001, 1)
    is_second_half = table["kind"].isin(["duplicate", "induction"])
    table["rows"] = np.where(is_second_half, table["context_length"] // 2, table["context_length"])
    table["chance"] = np.log(table["context_length"]) / table["context_length"]
    yield "scores", {"detectors": table.drop(columns="growth")}
