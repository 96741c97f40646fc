"""Runs of any size with plausible position parameters and measures, to time the code that reads runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.bins import bin_center, position_bin_edges, visible_bin_edges
from headscope.runs.columns import all_tables
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter


@dataclass(frozen=True)
class Sizes:
    """The size of a synthetic run. Its heads range from retrieving (growth 0) to aggregating (growth 0.95)."""

    layers: int = 4
    heads: int = 6
    groups: int = 2
    pairs: int = 8
    lengths: tuple[int, ...] = (256, 1024)
    docs: int = 3
    seed: int = 0

    @cached_property
    def units(self) -> pd.DataFrame:
        """Every head: layer, head, kv_group, and its `growth`, the exponent of its effective length in the context."""
        units = pd.DataFrame(list(product(range(self.layers), range(self.heads))), columns=["layer", "head"])
        units["kv_group"] = units["head"] // (self.heads // self.groups)
        return units.assign(growth=(np.arange(len(units)) * 0.618) % 1)


def synthetic_run(out: Path, models: Sequence[str], sizes: Sizes) -> Run:
    """Write a run under `out` with the tables of position parameters and of `measure`."""
    blocks: dict[str, list[pd.DataFrame]] = {}
    for number, model in enumerate(models):
        for rows in (position_rows(sizes, model, number), *measure_rows(sizes, model, number)):
            for name, table in rows.items():
                blocks.setdefault(name, []).append(table)
    tables = {name: pd.concat(frames, ignore_index=True) for name, frames in blocks.items()}
    with RunWriter.open(out, "synthetic", {"models": [*models], **asdict(sizes)}) as writer:
        writer.add("all", tables)  # one job, since each costs several writes to the disk
        return writer.commit(["all"], synthetic_manifest(models, sizes.layers, sizes.heads, sizes.groups))


def synthetic_manifest(models: Sequence[str], layers: int = 4, heads: int = 6, groups: int = 2) -> dict[str, Any]:
    """The entries that a study would write to run.json."""
    geometry: dict[str, Any] = {"layers": layers, "heads": heads, "kv_groups": groups, "head_dim": 16}
    geometry |= {"numbers": [*range(layers)], "windows": [None] * layers}
    return {
        "models": [
            {
                "label": label,
                "spec": f"tiny@{label}",
                "checkpoint": "tiny",
                "weights_sha256": "a" * 64,
                "scheme": label,
                "scheme_name": label.partition(":")[0],
                "scheme_options": {},
                "training": None,
                "pretraining": None,
                "step": None,
                "geometry": geometry,
            }
            for label in models
        ],
        "seed": 0,
        "versions": {"headscope": "0.1.0"},
    }


def rope_frequencies(pairs: int, shift: float = 0.0) -> np.ndarray:
    """RoPE frequencies with base 10,000, the low ones shifted by `shift` in log scale."""
    return np.asarray(np.exp(-np.log(1e4) * np.arange(pairs) / pairs + shift * np.arange(pairs) / pairs))


def position_rows(sizes: Sizes, model: str, number: int) -> dict[str, pd.DataFrame]:
    """The tables `positions` and `scales` of the model with this number, whose low frequencies are shifted by it."""
    is_start = model.startswith("yarn:")  # the scheme that training starts from
    theta, units = rope_frequencies(sizes.pairs, 0.0 if is_start else -0.1 * number), sizes.units
    planes = pd.DataFrame({"pair": np.arange(sizes.pairs), "theta": theta})
    positions = units[["layer", "kv_group"]].drop_duplicates().merge(planes, how="cross")
    positions["log_theta"] = np.log(positions["theta"])
    positions["log_theta_init"] = positions["log_theta_base"] = np.log(rope_frequencies(sizes.pairs))[positions["pair"]]
    mean = float(np.log(theta).mean())
    scales = units[["layer", "head", "kv_group"]].assign(
        tau=1.0 + 0.05 * units["growth"],
        gamma=0.02 * units["growth"],
        reference_length=512,
        logit_scale=1 / (1.0 + 0.05 * units["growth"]),
        attention_factor=1.0,
        softmax_factor=1 / (1.0 + 0.05 * units["growth"]),
        effective_base=np.exp(-4 * mean * sizes.pairs / (2 * sizes.pairs - 2)),
        mean_log_theta=mean,
    )
    keys: dict[str, Any] = {"model": model, "context_length": 0}
    return {"positions": positions.assign(**keys), "scales": scales.assign(**keys)}


def measure_rows(sizes: Sizes, model: str, number: int) -> Iterator[Mapping[str, pd.DataFrame]]:
    """The tables of `measure` for each length and document of the model with this number."""
    for length, doc in product(sizes.lengths, range(sizes.docs)):
        rng = np.random.default_rng([sizes.seed, number, length, doc])
        shared_keys: dict[str, Any] = {"model": model, "context_length": length}
        keys = {**shared_keys, "doc": f"synthetic/{doc}"}
        yield {
            "attention": _attention(sizes.units, length, rng).assign(**keys),
            "pairs": _pairs(sizes, rng).assign(**keys),
            "distance": _distance(sizes, length, rng).assign(**shared_keys),
            "nll": _nll(length, number, doc).assign(**keys),
        }


def _attention(units: pd.DataFrame, length: int, rng: np.random.Generator) -> pd.DataFrame:
    edges = visible_bin_edges(length)
    lower = np.concatenate([[0], edges[:-1]])
    counts = dict.fromkeys(("rows", "population", "sink_rows", "sink_population"), np.minimum(edges, length) - lower)
    bins = pd.DataFrame({"visible": edges, **counts})
    bins["n"] = bin_center(edges, length)
    rows = units.merge(bins, how="cross")
    log_ess2 = 0.4 * (1 - rows["growth"]) + 0.95 * rows["growth"] * np.log(rows["n"])
    rows["log_ess2"] = np.clip(log_ess2 + rng.normal(0, 0.05, len(rows)), 0, np.log(rows["n"]))
    rows["ess2"] = np.exp(rows["log_ess2"]) * 1.02
    rows["ess1"] = rows["ess2"] * 1.3
    rows["max_weight"] = 0.9 / np.sqrt(rows["ess2"])
    rows["sink_mass"] = 0.6 * (1 - rows["growth"]) * rows["max_weight"]
    rows["local_mass"] = np.minimum(1, 32 / rows["n"]) * 0.8
    rows["mean_distance"] = rows["n"] * (0.1 + 0.4 * rows["growth"])
    values = [column for column in all_tables()["attention"].columns if column.kind == "value"]
    others = {column.name: column.low or 0.0 for column in values if column.name not in rows}
    return rows.drop(columns=["growth", "n"]).assign(**others)


def _pairs(sizes: Sizes, rng: np.random.Generator) -> pd.DataFrame:
    planes = pd.DataFrame({"pair": np.arange(sizes.pairs), "theta": rope_frequencies(sizes.pairs)})
    rows = sizes.units.merge(planes, how="cross")
    rows["mean_abs"] = np.exp(rows["growth"] * rows["pair"] / 2 + rng.normal(0, 0.1, len(rows)))
    rows["mean_abs_se"] = 0.02 * rows["mean_abs"]
    rows["mean_signed"] = 0.3 * rows["mean_abs"] * (-1.0) ** rows["pair"]
    rows["rms"] = 1.25 * rows["mean_abs"]
    rows["norm_product"] = 1.6 * rows["mean_abs"]
    return rows.drop(columns="growth")


def _distance(sizes: Sizes, length: int, rng: np.random.Generator) -> pd.DataFrame:
    far = np.unique(np.round(2 ** np.arange(0, np.log2(length), 0.5)).astype(int))
    distances = pd.DataFrame({"distance": np.concatenate([[0], far[far < length]])})
    planes = pd.DataFrame({"pair": np.arange(sizes.pairs), "theta": rope_frequencies(sizes.pairs)})
    rows = sizes.units.merge(planes, how="cross").merge(distances, how="cross")
    signed = np.cos(rows["theta"] * rows["distance"]) * (1 + rows["growth"])
    rows["mean_signed"] = signed + rng.normal(0, 0.02, len(rows))
    rows["n"] = length - rows["distance"]
    return rows.drop(columns=["growth", "theta"])


def _nll(length: int, number: int, doc: int) -> pd.DataFrame:
    edges = position_bin_edges(length)
    nll = 3.0 + 2.0 / np.log(edges + 2) + 0.1 * doc + 0.05 * number
    return pd.DataFrame({"position": edges, "nll": nll, "tokens": np.diff(edges, prepend=0)})
