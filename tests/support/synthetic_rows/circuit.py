"""Synthetic rows of the probe of circuits of heads."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.circuit.declaration import CIRCUIT, CIRCUIT_MEMBERS, WHOLE


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell: a circuit of three heads with most of the logit difference of every prompt."""
    rng = np.random.default_rng([sizes.seed, model_index])
    keys: dict[str, Any] = {"model": model, "prompts": "ioi", "complement": "mean:prompts", "metric": "logit_diff"}
    keys["is_counted"] = True
    heads, subsets, members = sizes.units.drop(columns="growth").head(3), [], []
    for number in range(sizes.docs):
        keys["pair"] = f"ioi {number}"
        for name, circuit, whole in (
            (WHOLE, 3.0, 4.0),
            ("random 1", 1.5, 2.5),
            ("random 2", 1.0, 1.2),
            ("greedy 1", 1, 3),
        ):
            values = np.array([circuit, whole]) + rng.normal(0, 0.1, 2)
            removed = "" if name == WHOLE else "L0H0"
            columns = {"metric_circuit": values[0], "metric_model": values[1], "metric_empty": 0.1}
            columns |= {"size": 3, "reference_prompts": sizes.docs}
            is_selecting = name.startswith("greedy") and number % 2 == 0
            subsets.append({**keys, "subset": name, "heads": removed, **columns, "is_selecting": is_selecting})
        without = (3.0 - np.array([1.5, 0.8, 0.0]) + rng.normal(0, 0.1, 3))[: len(heads)]
        members.append(heads.assign(**keys, positions="all", metric_circuit=3.0, metric_without=without))
    yield "ioi", {CIRCUIT.name: pd.DataFrame(subsets), CIRCUIT_MEMBERS.name: pd.concat(members, ignore_index=True)}
