"""Made-up scores, for tests and timings: each model is a little worse than the one before, and longer is harder."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Two tasks made to each length, and one with two metrics in the longest."""
    rng = np.random.default_rng([sizes.seed, model_index])
    made = [(task, length, "match") for task in ("niah_single_1", "ruler_vt") for length in sizes.lengths]
    made += [("arc_easy", max(sizes.lengths), metric) for metric in ("acc", "acc_norm")]
    frame = pd.DataFrame(made, columns=["task", "context_length", "metric"])
    easy = 0.8 - 0.1 * model_index - 0.3 * frame["context_length"] / max(sizes.lengths)
    frame["score"] = (easy + 0.05 * rng.random(len(frame))).clip(0, 1)
    frame["stderr"] = np.sqrt(frame["score"] * (1 - frame["score"]) / 100)
    yield (
        f"{model}: tasks",
        {"tasks": frame.assign(model=model, filter="none", documents=100, higher_is_better=True)},
    )
