"""Synthetic rows of the patching probe."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.patching.declaration import ACTIVATIONS, ALL_POSITIONS, LAYER_ACTIVATIONS, WHOLE_GROUP, effect_columns


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell per pair; heads with growth near 0 have the largest effects, and estimates are a little off."""
    for number in range(sizes.docs):
        rng = np.random.default_rng([sizes.seed, model_index, number])
        prompts, pair = ("ioi", "induction")[number % 2], f"pair {number // 2}"
        keys = {"model": model, "prompts": prompts, "pair": pair}
        blocks = [_synthetic_activation(sizes.units, activation, rng) for activation in ACTIVATIONS]
        tokens = pd.DataFrame({"position": range(3), "clean": ["a", " b", " c"], "corrupted": ["a", " x", " c"]})
        rows = pd.concat(blocks, ignore_index=True).assign(**keys)
        spans = rows[(rows["activation"] == "z") & (rows["position"] > 0)].assign(first=lambda f: f["position"])
        spans = spans.assign(last=spans["first"], span=np.where(spans["first"] == 2, "last", "subject"))
        yield (
            f"{prompts} {pair}",
            {
                "patching": rows,
                "patching_tokens": tokens.assign(**keys),
                "patching_spans": spans.drop(columns="position"),
                "patching_sets": _synthetic_set(rng).assign(**keys),
                "patching_layers": _synthetic_layers(sizes.units, rng).assign(**keys),
            },
        )


def _synthetic_activation(heads: pd.DataFrame, activation: str, rng: np.random.Generator) -> pd.DataFrame:
    """Exact and estimated rows of one activation; those of z also at three positions."""
    units = heads
    if activation in ("k", "v"):
        units = heads.groupby(["layer", "kv_group"], as_index=False)["growth"].min().assign(head=WHOLE_GROUP)
    positions = [ALL_POSITIONS, 0, 1, 2] if activation == "z" else [ALL_POSITIONS]
    rows = pd.concat([units.assign(position=at) for at in positions], ignore_index=True)
    true_effect = np.exp(-12 * rows["growth"]) / np.where(rows["position"] < 0, 1, 3)
    blocks = []
    for method, noise in (("exact", 0.0), ("estimate", 0.02)):
        patched = -1 + 3 * (true_effect + rng.normal(0, 0.01 + noise, len(rows)))
        keys = {"activation": activation, "direction": "denoising", "metric": "logit_diff", "method": method}
        columns = effect_columns(patched, 2.0, -1.0, "denoising")
        blocks.append(rows.drop(columns="growth").assign(group="", **keys, **columns))
    return pd.concat(blocks, ignore_index=True)


def _synthetic_layers(heads: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    """Exact and estimated rows of layers: larger effects in later layers; the residual stream by position only."""
    layers = heads[["layer"]].drop_duplicates()
    places = [
        layers.assign(activation=activation, position=at, last=at)
        for activation in LAYER_ACTIVATIONS
        for at in ([0, 1, 2] if activation == "resid_pre" else [ALL_POSITIONS, 0, 1, 2])
    ]
    rows = pd.concat(places, ignore_index=True)
    share = (rows["layer"] + 1) / (rows["layer"].max() + 1) / np.where(rows["position"] < 0, 1, 3)
    blocks = []
    for method, noise in (("exact", 0.01), ("estimate", 0.03)):
        columns = effect_columns(-1 + 3 * (share + rng.normal(0, noise, len(rows))), 2.0, -1.0, "denoising")
        keys = {"direction": "denoising", "metric": "logit_diff", "method": method, "span": "", "group": ""}
        blocks.append(rows.assign(**keys, **columns))
    return pd.concat(blocks, ignore_index=True)


def _synthetic_set(rng: np.random.Generator) -> pd.DataFrame:
    """A row of three heads patched together."""
    columns = effect_columns(-1 + 3 * rng.normal(0.8, 0.02, 1), 2.0, -1.0, "denoising")
    keys = {"activation": "z", "span": "", "direction": "denoising", "metric": "logit_diff", "group": "", "size": 3}
    return pd.DataFrame({**keys, **columns})
