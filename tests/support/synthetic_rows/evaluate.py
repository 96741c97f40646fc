"""Synthetic rows of the evaluate probe."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell of random scores that fall with the length and from model to model.

    Two tasks have every length, and one with two metrics has the longest.
    """
    rng = np.random.default_rng([sizes.seed, model_index])
    keys = [(task, length, "match") for task in ("niah_single_1", "ruler_vt") for length in sizes.lengths]
    keys += [("arc_easy", max(sizes.lengths), metric) for metric in ("acc", "acc_norm")]
    table = pd.DataFrame(keys, columns=["task", "context_length", "metric"])
    mean = 0.8 - 0.1 * model_index - 0.3 * table["context_length"] / max(sizes.lengths)
    table["score"] = (mean + 0.05 * rng.random(len(table))).clip(0, 1)
    table["stderr"] = np.sqrt(table["score"] * (1 - table["score"]) / 100)
    yield f"{model}: tasks", {"tasks": table.assign(model=model, filter="none", documents=100, higher_is_better=True)}
