"""Synthetic rows of the ablation probe."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.ablation.declaration import KINDS


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell per prompt; heads with growth near 0 matter most."""
    for number in range(sizes.docs):
        rng = np.random.default_rng([sizes.seed, model_index, number])
        keys: dict[str, Any] = {"model": model, "prompts": "ioi", "pair": f"ioi {number}", "metric": "logprob"}
        keys |= {"metric_before": -1.0, "is_counted": True}
        blocks, sets = [], []
        for name in KINDS:
            kind = "streaming:64+256" if name == "streaming" else name
            change = -np.exp(-12 * sizes.units["growth"]) + rng.normal(0, 0.02, len(sizes.units))
            blocks.append(sizes.units.drop(columns="growth").assign(kind=kind, metric_after=-1.0 + change))
            after = np.array([-3.0, -1.1, -1.1]) + rng.normal(0, 0.05, 3)
            sets.append(pd.DataFrame({"kind": kind, "draw": range(3), "size": 2, "metric_after": after}))
        tables = {"ablation": blocks, "ablation_sets": sets}
        yield (
            f"ioi {number}",
            {name: pd.concat(parts, ignore_index=True).assign(**keys) for name, parts in tables.items()},
        )
