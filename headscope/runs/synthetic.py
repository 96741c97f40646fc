"""Synthetic runs of any size with plausible numbers in every table, to test and time the code that reads runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope import plugins
from headscope.probe import Probe
from headscope.runs.arrow import Rows
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter


@dataclass(frozen=True)
class Sizes:
    """The size of a synthetic run.

    `heads` are (layer, head, kv_group), each with a `growth` exponent: 0 for retrieval, 1 for aggregation.
    """

    heads: pd.DataFrame
    pairs: int
    lengths: Sequence[int]
    docs: int
    seed: int


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


def synthetic_run(
    out: Path,
    models: Sequence[str] = ("base", "yarn"),
    layers: int = 4,
    heads: int = 6,
    groups: int = 2,
    pairs: int = 8,
    lengths: Sequence[int] = (256, 1024),
    docs: int = 3,
    seed: int = 0,
    probes: Collection[str] = (),
) -> Run:
    """Write a run under `out` whose heads range from retrieving (growth 0) to aggregating (growth 0.95).

    It has the tables of these probes, by default of all.
    """
    config = {"models": list(models), "lengths": list(lengths), "docs": docs, "seed": seed, "layers": layers}
    config |= {"heads": heads, "groups": groups, "pairs": pairs, "probes": [*probes]}
    shape = (layers, heads, groups, pairs, tuple(lengths), docs, seed)
    tables = _synthetic_tables(tuple(models), *shape, tuple(probes), tuple(plugins.probes().values()))
    with RunWriter.open(out, "synthetic", config) as writer:  # one job, since each costs several writes to the disk
        writer.add("all", tables)
        return writer.commit(["all"], synthetic_manifest(models, layers, heads, groups))


@lru_cache(maxsize=32)
def _synthetic_tables(
    models: tuple[str, ...],
    layers: int,
    heads: int,
    groups: int,
    pairs: int,
    lengths: tuple[int, ...],
    docs: int,
    seed: int,
    probes: tuple[str, ...],
    _declared: tuple[Probe, ...],  # the tables depend on them
) -> dict[str, pd.DataFrame]:
    """The tables of these probes. Tests often write a run of the same ones, each to a folder of its own."""
    heads_of_model = pd.DataFrame(list(product(range(layers), range(heads))), columns=["layer", "head"])
    heads_of_model["kv_group"] = heads_of_model["head"] // (heads // groups)
    heads_of_model["growth"] = (np.arange(len(heads_of_model)) * 0.618) % 1
    sizes = Sizes(heads_of_model, pairs, lengths, docs, seed)
    blocks: dict[str, list[pd.DataFrame]] = {}
    for number, model in enumerate(models):
        is_start = model.startswith("yarn:")  # the scheme that training starts from
        shift = 0.0 if is_start else -0.1 * number
        cells: list[tuple[str, Mapping[str, Rows]]] = [
            ("positions", _position_parameters(model, heads_of_model, pairs, shift))
        ]
        for probe in plugins.probes().values():
            if not probes or probe.name in probes:
                cells += probe.synthetic_rows(sizes, model, number)
        for _, tables in cells:
            for name, columns in tables.items():
                blocks.setdefault(name, []).append(pd.DataFrame(columns))
    return {name: pd.concat(frames, ignore_index=True) for name, frames in blocks.items()}


def rope_frequencies(pairs: int, shift: float = 0.0) -> np.ndarray:
    """RoPE frequencies with base 10,000, the low ones shifted by `shift` in log scale."""
    return np.asarray(np.exp(-np.log(1e4) * np.arange(pairs) / pairs + shift * np.arange(pairs) / pairs))


def _position_parameters(model: str, heads: pd.DataFrame, pairs: int, shift: float) -> dict[str, pd.DataFrame]:
    shared = heads[["layer", "kv_group"]].drop_duplicates()
    planes = pd.DataFrame({"pair": np.arange(pairs), "theta": rope_frequencies(pairs, shift)})
    positions = shared.merge(planes, how="cross")
    positions["context_length"] = 0
    positions["log_theta"] = np.log(positions["theta"])
    positions["log_theta_init"] = positions["log_theta_base"] = np.log(rope_frequencies(pairs))[positions["pair"]]
    mean = float(np.log(rope_frequencies(pairs, shift)).mean())
    scales = heads[["layer", "head", "kv_group"]].assign(
        tau=1.0 + 0.05 * heads["growth"],
        gamma=0.02 * heads["growth"],
        reference_length=512,
        logit_scale=1 / (1.0 + 0.05 * heads["growth"]),
        context_length=0,
        attention_factor=1.0,
        softmax_factor=1 / (1.0 + 0.05 * heads["growth"]),
        effective_base=np.exp(-4 * mean * pairs / (2 * pairs - 2)),
        mean_log_theta=mean,
    )
    return {"positions": positions.assign(model=model), "scales": scales.assign(model=model)}
