"""Synthetic rows of the attribution probe."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from headscope.bench.synthetic_run import Sizes
from headscope.bins import position_bin_edges
from headscope.runs.arrow import Rows


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Synthetic rows of each length and document: late heads of low growth contribute most."""
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        rng = np.random.default_rng([sizes.seed, model_index, length, doc])
        keys: dict[str, Any] = {"model": model, "context_length": length, "doc": f"synthetic/{doc}"}
        edges = position_bin_edges(length)
        bins = pd.DataFrame({"position": edges, "tokens": np.diff(edges, prepend=0)})
        heads = sizes.units.merge(bins, how="cross").assign(**keys)
        heads["contribution"] = 0.1 * (0.5 - heads["growth"]) * (1 + heads["layer"]) + rng.normal(0, 0.01, len(heads))
        by_layer = heads.groupby(["layer", "position", "tokens"], as_index=False)["contribution"].sum()
        parts = [by_layer.assign(part="heads"), by_layer.assign(part="other", contribution=0.3)]
        for part, contribution in (("embedding", 0.2), ("bias", 0.0)):
            parts.append(bins.assign(part=part, layer=0, contribution=contribution))
        terms = pd.concat(parts, ignore_index=True)
        logit = terms.groupby(["position", "tokens"], as_index=False)["contribution"].sum()
        rows = pd.concat([terms, logit.assign(part="logit", layer=0)], ignore_index=True).assign(**keys)
        yield f"{length}/{doc}", {"attribution": heads.drop(columns="growth"), "attribution_parts": rows}
