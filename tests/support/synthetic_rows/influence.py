"""Synthetic rows of the influence probe."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell per document with every unit of a model at the longest length."""
    for doc in range(sizes.docs):
        keys: dict[str, Any] = {"model": model, "context_length": max(sizes.lengths), "doc": f"synthetic/{doc}"}
        tables = _synthetic_document(sizes.units, np.random.default_rng([sizes.seed, model_index, doc]))
        yield str(doc), {name: table.assign(**keys) for name, table in tables.items()}


def _synthetic_document(units: pd.DataFrame, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    """Estimates equal the exact effects plus a little noise; the effect of a set is a little less than the sum."""
    heads = units.assign(effect=0.05 * np.exp(-12 * units["growth"]))
    groups = heads.groupby(["layer", "kv_group"], as_index=False)["effect"].sum().assign(head=-1)
    blocks, sets = [], []
    for component, members, unit in (("freq", groups, "group"), ("scale", heads, "head"), ("joint", groups, "group")):
        sweep: dict[str, Any] = {"component": component, "target": "init", "nll_before": 3.2}
        delta = members["effect"] + rng.normal(0, 0.0005, len(members))
        block = members[["layer", "head", "kv_group"]].assign(**sweep)
        blocks.append(block.assign(method="exact", delta_nll=delta))
        blocks.append(block.assign(method="estimate", delta_nll=1.2 * delta + rng.normal(0, 0.0002, len(members))))
        ranked = np.sort(members["effect"])[::-1]
        for size in sorted({1, 2, 4, len(members)} & {*range(len(members) + 1)}):
            draws = [("top", 0, ranked[:size].sum())]
            draws += [("random", n, rng.choice(ranked, size, replace=False).sum()) for n in range(2)]
            sets += [
                {**sweep, "unit": unit, "choice": choice, "size": size, "draw": draw, "delta_nll": 0.9 * total}
                for choice, draw, total in draws
            ]
    return {"influence": pd.concat(blocks, ignore_index=True), "influence_sets": pd.DataFrame(sets)}
