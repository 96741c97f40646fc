"""Made-up influences, for tests and timings: a heavy tail, in which heads of growth near 0 matter most."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Every unit of the model of that number at the longest length, a cell a document."""
    for doc in range(sizes.docs):
        keys: dict[str, Any] = {"model": model, "context_length": max(sizes.lengths), "doc": f"synthetic/{doc}"}
        tables = _synthetic_document(sizes.units, np.random.default_rng([sizes.seed, model_index, doc]))
        yield str(doc), {name: table.assign(**keys) for name, table in tables.items()}


def _synthetic_document(units: pd.DataFrame, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    """The screen sees the units of each component with a little noise; sets add up to a little less than their sum."""
    heads = units.assign(effect=0.05 * np.exp(-12 * units["growth"]))
    groups = heads.groupby(["layer", "kv_group"], as_index=False)["effect"].sum().assign(head=-1)
    blocks, sets = [], []
    for component, chosen, unit in (("freq", groups, "group"), ("scale", heads, "head"), ("joint", groups, "group")):
        told: dict[str, Any] = {"component": component, "target": "init", "nll_before": 3.2}
        delta = chosen["effect"] + rng.normal(0, 0.0005, len(chosen))
        block = chosen[["layer", "head", "kv_group"]].assign(**told)
        blocks.append(block.assign(method="exact", delta_nll=delta))
        blocks.append(block.assign(method="estimate", delta_nll=1.2 * delta + rng.normal(0, 0.0002, len(chosen))))
        ranked = np.sort(chosen["effect"])[::-1]
        for size in sorted({1, 2, 4, len(chosen)} & {*range(len(chosen) + 1)}):
            draws = [("top", 0, ranked[:size].sum())]
            draws += [("random", n, rng.choice(ranked, size, replace=False).sum()) for n in range(2)]
            sets += [
                {**told, "unit": unit, "choice": choice, "size": size, "draw": draw, "delta_nll": 0.9 * total}
                for choice, draw, total in draws
            ]
    return {"influence": pd.concat(blocks, ignore_index=True), "influence_sets": pd.DataFrame(sets)}
