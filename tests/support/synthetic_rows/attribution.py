"""Synthetic rows of the attribution probe."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.base.bins import position_bin_edges
from headscope.runs.arrow import Rows
from probes.attribution.answers.declaration import ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS


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
    yield from answer_cells(sizes, model, model_index)


def answer_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """Synthetic rows of one cell per prompt, three tokens each: late heads of low growth favour the answer."""
    for number in range(sizes.docs):
        rng = np.random.default_rng([sizes.seed, model_index, number, 1])
        keys: dict[str, Any] = {"model": model, "prompts": "ioi", "pair": f"ioi {number}"}
        tokens = pd.DataFrame({"position": range(3), "token": ["When", " Mary", " to"]})
        heads = sizes.units.merge(tokens[["position"]], how="cross").assign(**keys)
        heads["contribution"] = (0.2 * heads["position"] * (0.5 - heads["growth"]) * (1 + heads["layer"])) + rng.normal(
            0, 0.01, len(heads)
        )
        by_layer = heads.groupby(["layer", "position"], as_index=False)["contribution"].sum()
        parts = [by_layer.assign(part="heads"), by_layer.assign(part="other", contribution=0.1)]
        parts += [
            tokens[["position"]].assign(part=part, layer=0, contribution=value)
            for part, value in (("embedding", 0.2), ("bias", 0.0))
        ]
        terms = pd.concat(parts, ignore_index=True)
        logit = terms.groupby("position", as_index=False)["contribution"].sum().assign(part="logit", layer=0)
        yield (
            f"ioi {number}",
            {
                ANSWER_HEADS.name: heads.drop(columns="growth").assign(is_counted=True),
                ANSWER_PARTS.name: pd.concat([terms, logit], ignore_index=True).assign(is_counted=True, **keys),
                ANSWER_TOKENS.name: tokens.assign(answer=" Mary", wrong=" John", **keys),
            },
        )
