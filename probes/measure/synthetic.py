"""Synthetic rows of the tables of `measure`, for tests and timings."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from headscope.bins import bin_center, position_bin_edges, visible_bin_edges
from headscope.runs.synthetic import Sizes, rope_frequencies


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (cell, rows by table) for every length and document of the model with index `model_index`."""
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        rng = np.random.default_rng([sizes.seed, model_index, length, doc])
        shared_keys = {"model": model, "context_length": length}
        keys = {**shared_keys, "doc": f"synthetic/{doc}"}
        yield (
            f"{length}/{doc}",
            {
                "attention": _synthetic_attention(keys, sizes.heads, length, rng),
                "pairs": _synthetic_pairs(keys, sizes.heads, sizes.pairs, rng),
                "distance": _synthetic_distance(shared_keys, sizes.heads, sizes.pairs, length, rng),
                "nll": _synthetic_nll(keys, length, model_index, doc),
            },
        )


def _synthetic_attention(
    keys: dict[str, Any], units: pd.DataFrame, length: int, rng: np.random.Generator
) -> pd.DataFrame:
    edges = visible_bin_edges(length)
    lower = np.concatenate([[0], edges[:-1]])
    counts = dict.fromkeys(("rows", "population", "sink_rows", "sink_population"), np.minimum(edges, length) - lower)
    bins = pd.DataFrame({"visible": edges, **counts})
    bins["n"] = bin_center(edges, length)
    rows = units.merge(bins, how="cross")
    noise = rng.normal(0, 0.05, len(rows))
    rows["log_ess2"] = np.clip(
        0.4 * (1 - rows["growth"]) + 0.95 * rows["growth"] * np.log(rows["n"]) + noise, 0, np.log(rows["n"])
    )
    rows["ess2"] = np.exp(rows["log_ess2"]) * 1.02
    rows["ess1"] = rows["ess2"] * 1.3
    rows["max_weight"] = 0.9 / np.sqrt(rows["ess2"])
    rows["sink_mass"] = 0.6 * (1 - rows["growth"]) * rows["max_weight"]
    rows["local_mass"] = np.minimum(1, 32 / rows["n"]) * 0.8
    rows["mean_distance"] = rows["n"] * (0.1 + 0.4 * rows["growth"])
    return rows.drop(columns=["growth", "n"]).assign(**keys)


def _synthetic_pairs(keys: dict[str, Any], units: pd.DataFrame, pairs: int, rng: np.random.Generator) -> pd.DataFrame:
    planes = pd.DataFrame({"pair": np.arange(pairs), "theta": rope_frequencies(pairs)})
    rows = units.merge(planes, how="cross")
    rows["mean_abs"] = np.exp(rows["growth"] * rows["pair"] / 2 + rng.normal(0, 0.1, len(rows)))
    rows["mean_abs_se"] = 0.02 * rows["mean_abs"]
    rows["mean_signed"] = 0.3 * rows["mean_abs"] * (-1.0) ** rows["pair"]
    rows["rms"] = 1.25 * rows["mean_abs"]
    rows["norm_product"] = 1.6 * rows["mean_abs"]
    return rows.drop(columns="growth").assign(**keys)


def _synthetic_distance(
    keys: dict[str, Any], units: pd.DataFrame, pairs: int, length: int, rng: np.random.Generator
) -> pd.DataFrame:
    far = np.unique(np.round(2 ** np.arange(0, np.log2(length), 0.5)).astype(int))
    distances = pd.DataFrame({"distance": np.concatenate([[0], far[far < length]])})
    planes = pd.DataFrame({"pair": np.arange(pairs), "theta": rope_frequencies(pairs)})
    rows = units.merge(planes, how="cross").merge(distances, how="cross")
    rows["mean_signed"] = np.cos(rows["theta"] * rows["distance"]) * (1 + rows["growth"]) + rng.normal(
        0, 0.02, len(rows)
    )
    rows["n"] = length - rows["distance"]
    return rows.drop(columns=["growth", "theta"]).assign(**keys)


def _synthetic_nll(keys: dict[str, Any], length: int, model_index: int, doc: int) -> pd.DataFrame:
    edges = position_bin_edges(length)
    nll = 3.0 + 2.0 / np.log(edges + 2) + 0.1 * doc + 0.05 * model_index
    return pd.DataFrame({"position": edges, "nll": nll, "tokens": np.diff(edges, prepend=0)}).assign(**keys)
