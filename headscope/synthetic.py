"""A run with plausible numbers in every table, without a model: to test and time what reads runs, at any size."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.bins import middle, position_edges, visible_edges
from headscope.store import Run, RunWriter


def manifest(
    models: Sequence[str], layers: int = 4, heads: int = 6, groups: int = 2, sha256: str = "a" * 64
) -> dict[str, Any]:
    """What a study would put into run.json."""
    geometry = {"layers": layers, "heads": heads, "kv_groups": groups, "head_dim": 16}
    return {
        "models": [
            {
                "label": label,
                "spec": f"tiny@{label}",
                "checkpoint": "tiny",
                "weights_sha256": sha256,
                "scheme": label,
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
) -> Run:
    """Write a run under `out` whose heads range from retrieving (growth 0) to aggregating (growth 0.95)."""
    config = {"models": list(models), "lengths": list(lengths), "docs": docs, "seed": seed, "layers": layers}
    config |= {"heads": heads, "groups": groups, "pairs": pairs}
    units = pd.DataFrame(list(product(range(layers), range(heads))), columns=["layer", "head"])
    units["kv_group"] = units["head"] // (heads // groups)
    units["growth"] = (np.arange(len(units)) * 0.618) % 1
    cells: dict[str, Mapping[str, Any]] = {}
    for m, model in enumerate(models):
        cells[f"{model}/positions"] = _parameters(model, units, pairs, shift=-0.1 * m)
        cells[f"{model}/needle"] = _needles(model, units, lengths, 0.15 * m, np.random.default_rng([seed, m]))
        for length, d in product(lengths, range(docs)):
            rng = np.random.default_rng([seed, m, length, d])
            keys = {"model": model, "context_length": length, "doc": f"synthetic/{d}"}
            cells[f"{model}/{length}/{d}"] = {
                "attention": _attention(keys, units, length, rng),
                "pairs": _pairs(keys, units, pairs, rng),
                "distance": _distance({k: keys[k] for k in ("model", "context_length")}, units, pairs, length, rng),
                "nll": _nll(keys, length, m, d),
            }
        for d in range(docs):
            keys = {"model": model, "context_length": max(lengths), "doc": f"synthetic/{d}"}
            cells[f"{model}/influence/{d}"] = _influences(keys, units, np.random.default_rng([seed, m, d]))
    with RunWriter.open(out, "synthetic", config) as writer:
        for cell, tables in cells.items():
            writer.add(cell, tables)
        return writer.commit(list(cells), manifest(models, layers, heads, groups))


def _theta(pairs: int, shift: float = 0.0) -> np.ndarray:
    return np.asarray(np.exp(-np.log(1e4) * np.arange(pairs) / pairs + shift * np.arange(pairs) / pairs))


def _parameters(model: str, units: pd.DataFrame, pairs: int, shift: float) -> dict[str, pd.DataFrame]:
    shared = units[["layer", "kv_group"]].drop_duplicates()
    planes = pd.DataFrame({"pair": np.arange(pairs), "theta": _theta(pairs, shift)})
    positions = shared.merge(planes, how="cross")
    positions["log_theta"] = np.log(positions["theta"])
    positions["log_theta_init"] = positions["log_theta_base"] = np.log(_theta(pairs))[positions["pair"]]
    mean = float(np.log(_theta(pairs, shift)).mean())
    scales = units[["layer", "head", "kv_group"]].assign(
        tau=1.0 + 0.05 * units["growth"],
        gamma=0.02 * units["growth"],
        reference_length=512,
        logit_scale=1 / (1.0 + 0.05 * units["growth"]),
        effective_base=np.exp(-4 * mean * pairs / (2 * pairs - 2)),
        mean_log_theta=mean,
    )
    return {"positions": positions.assign(model=model), "scales": scales.assign(model=model)}


def _attention(keys: dict[str, Any], units: pd.DataFrame, length: int, rng: np.random.Generator) -> pd.DataFrame:
    edges = visible_edges(length)
    lower = np.concatenate([[0], edges[:-1]])
    bins = pd.DataFrame({"visible": edges, "rows": np.minimum(edges, length) - lower})
    bins["n"] = middle(edges, length)
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


def _pairs(keys: dict[str, Any], units: pd.DataFrame, pairs: int, rng: np.random.Generator) -> pd.DataFrame:
    planes = pd.DataFrame({"pair": np.arange(pairs), "theta": _theta(pairs)})
    rows = units.merge(planes, how="cross")
    rows["mean_abs"] = np.exp(rows["growth"] * rows["pair"] / 2 + rng.normal(0, 0.1, len(rows)))
    rows["mean_abs_se"] = 0.02 * rows["mean_abs"]
    rows["mean_signed"] = 0.3 * rows["mean_abs"] * (-1.0) ** rows["pair"]
    rows["rms"] = 1.25 * rows["mean_abs"]
    rows["norm_product"] = 1.6 * rows["mean_abs"]
    return rows.drop(columns="growth").assign(**keys)


def _distance(
    keys: dict[str, Any], units: pd.DataFrame, pairs: int, length: int, rng: np.random.Generator
) -> pd.DataFrame:
    far = np.unique(np.round(2 ** np.arange(0, np.log2(length), 0.5)).astype(int))
    distances = pd.DataFrame({"distance": np.concatenate([[0], far[far < length]])})
    planes = pd.DataFrame({"pair": np.arange(pairs), "theta": _theta(pairs)})
    rows = units.merge(planes, how="cross").merge(distances, how="cross")
    rows["mean_signed"] = np.cos(rows["theta"] * rows["distance"]) * (1 + rows["growth"]) + rng.normal(
        0, 0.02, len(rows)
    )
    rows["n"] = length - rows["distance"]
    return rows.drop(columns=["growth", "theta"]).assign(**keys)


def _nll(keys: dict[str, Any], length: int, model: int, doc: int) -> pd.DataFrame:
    edges = position_edges(length)
    nll = 3.0 + 2.0 / np.log(edges + 2) + 0.1 * doc + 0.05 * model
    return pd.DataFrame({"position": edges, "nll": nll, "tokens": np.diff(edges, prepend=0)}).assign(**keys)


def _needles(
    model: str, units: pd.DataFrame, lengths: Sequence[int], harder: float, rng: np.random.Generator
) -> dict[str, pd.DataFrame]:
    """Trials at 4 depths of 2 needles in 2 haystacks; heads of low growth copy, and deep or long ones fail more."""
    trials = pd.DataFrame(
        list(product(("strict", "absent"), ("bell", "ledger"), lengths, (0.0, 0.33, 0.67, 1.0), (0, 1))),
        columns=["mode", "needle", "context_length", "depth", "seed"],
    ).assign(model=model)
    trials["doc"] = "synthetic/" + trials["seed"].astype(str)
    trials["prompt_tokens"] = trials["context_length"]
    trials["span_start"] = (trials["depth"] * (trials["context_length"] - 60)).astype(int) + 9
    trials["span_end"] = trials["span_start"] + 8
    hidden = trials["mode"] == "strict"
    chance = np.where(hidden, 0.95 - harder - 0.2 * trials["depth"] * (trials["context_length"] == max(lengths)), 0.0)
    trials["success"] = rng.random(len(trials)) < chance
    trials["recall"] = np.where(trials["success"], 1.0, 0.1)
    trials["answer"] = np.where(trials["success"], "1847 by Odette Marchbanks.", "the king.")
    trials["steps"] = 10
    keys = ["model", "mode", "needle", "context_length", "depth", "doc", "seed"]
    rows = units.merge(trials[[*keys, "success"]], how="cross")
    skill = np.clip(1 - 4 * rows["growth"], 0, 1) * np.where(rows["mode"] == "strict", 0.3 + 0.7 * rows["success"], 0)
    rows["copies"] = rng.binomial(8, 0.95 * skill)
    rows["score"] = rows["copies"] / 8
    rows["mass"] = np.clip(0.7 * skill + 0.01 * rng.random(len(rows)), 0, 1)
    return {"needles": trials, "retrieval": rows.drop(columns=["growth", "success"])}


def _influences(keys: dict[str, Any], units: pd.DataFrame, rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    """A heavy tail: a few units matter, the most at growth near 0; the screen sees them with a little noise."""
    heads = units.assign(effect=0.05 * np.exp(-12 * units["growth"]))
    groups = heads.groupby(["layer", "kv_group"], as_index=False)["effect"].sum().assign(head=-1)
    blocks, sets = [], []
    for component, chosen, unit in (("freq", groups, "group"), ("scale", heads, "head"), ("joint", groups, "group")):
        told: dict[str, Any] = {"component": component, "target": "init", "nll_before": 3.2}
        delta = chosen["effect"] + rng.normal(0, 0.0005, len(chosen))
        block = chosen[["layer", "head", "kv_group"]].assign(**told)
        blocks.append(block.assign(method="exact", delta_nll=delta))
        blocks.append(block.assign(method="screen", delta_nll=1.2 * delta + rng.normal(0, 0.0002, len(chosen))))
        ranked = np.sort(chosen["effect"])[::-1]
        for size in (1, 2, 4, len(chosen)):
            draws = [("top", 0, ranked[:size].sum())]
            draws += [("random", n, rng.choice(ranked, size, replace=False).sum()) for n in range(2)]
            sets += [
                {**told, "unit": unit, "choice": c, "size": size, "draw": n, "delta_nll": 0.9 * total}
                for c, n, total in draws
            ]
    return {
        "influence": pd.concat(blocks, ignore_index=True).assign(**keys),
        "influence_sets": pd.DataFrame(sets).assign(**keys),
    }
