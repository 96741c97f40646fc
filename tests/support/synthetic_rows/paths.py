"""Synthetic rows of the paths probe."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.patching.declaration import effect_columns
from probes.patching.paths.declaration import LOGITS, RECEIVER_INPUTS


def synthetic_cells(sizes: Sizes, model: str, model_index: int) -> Iterator[tuple[str, Mapping[str, Rows]]]:
    """One cell per pair: estimates of all paths, and exact effects of some; senders with growth near 0 matter most."""
    paths = _synthetic_paths(sizes.units)
    true_effect = np.exp(-12 * paths.pop("growth"))
    chosen = np.argsort(-true_effect.to_numpy(), kind="stable")[:20]
    for number in range(sizes.docs):
        rng = np.random.default_rng([sizes.seed, model_index, number])
        keys: dict[str, Any] = {"model": model, "prompts": "ioi", "direction": "denoising", "metric": "logit_diff"}
        keys |= {"norms": "frozen"}
        changes = 3 * (true_effect + rng.normal(0, 0.02, len(paths)))
        estimates = paths.assign(change=changes, difference=3.0, pairs=1, **keys)
        patched = -1 + 3 * (true_effect.iloc[chosen] + rng.normal(0, 0.01, len(chosen)))
        columns = effect_columns(patched, 2.0, -1.0, "denoising")
        pair: dict[str, Any] = {"pair": f"ioi {number}", "group": "", "mlps_recomputed": False}
        pair |= {"sender_positions": "all", "receiver_positions": "all"}
        exact = paths.iloc[chosen].assign(**pair, **keys, **columns)
        yield f"ioi {number}", {"paths": exact, "path_estimates": estimates}


def _synthetic_paths(heads: pd.DataFrame) -> pd.DataFrame:
    """Every path between heads of different layers, and to the logits, with the growth of its sender."""
    names = {"layer": "layer", "head": "head"}
    senders, receivers = (
        heads.rename(columns={name: f"{end}_{name}" for name in names}).drop(columns="kv_group")
        for end in ("sender", "receiver")
    )
    pairs = senders.merge(receivers.drop(columns="growth"), how="cross")
    pairs = pairs[pairs["receiver_layer"] > pairs["sender_layer"]]
    blocks = [pairs.assign(through=name) for name in RECEIVER_INPUTS]
    direct = senders.assign(receiver_layer=LOGITS, receiver_head=LOGITS, through="logits")
    return pd.concat([*blocks, direct], ignore_index=True)
