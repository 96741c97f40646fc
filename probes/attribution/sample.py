"""Made-up writes, for tests and timings: late heads of low growth add most."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from headscope.bins import position_edges
from headscope.runs.arrow import Rows
from headscope.runs.synthetic import Sizes


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """A cell for each length and document."""
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        rng = np.random.default_rng([sizes.seed, model_index, length, doc])
        keys: dict[str, Any] = {"model": model, "context_length": length, "doc": f"synthetic/{doc}"}
        edges = position_edges(length)
        bins = pd.DataFrame({"position": edges, "tokens": np.diff(edges, prepend=0)})
        heads = sizes.units.merge(bins, how="cross").assign(**keys)
        heads["write"] = 0.1 * (0.5 - heads["growth"]) * (1 + heads["layer"]) + rng.normal(0, 0.01, len(heads))
        together = heads.groupby(["layer", "position", "tokens"], as_index=False)["write"].sum()
        named = [together.assign(part="heads"), together.assign(part="other", write=0.3)]
        named += [bins.assign(part=part, layer=0, write=write) for part, write in (("embedding", 0.2), ("bias", 0.0))]
        parts = pd.concat(named, ignore_index=True)
        logit = parts.groupby(["position", "tokens"], as_index=False)["write"].sum().assign(part="logit", layer=0)
        stored = pd.concat([parts, logit], ignore_index=True).assign(**keys)
        yield f"{length}/{doc}", {"writes": heads.drop(columns="growth"), "write_parts": stored}
