"""A run with rows in every kind of table, so that every page of the app has something to show."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from benchmarks.synthetic_run import synthetic_manifest
from headscope.run import Run
from headscope.runs.writer import RunWriter
from support.synthetic_rows import ROWS
from support.synthetic_runs import synthetic_run


def whole_run(
    folder: Path, models: Sequence[str] = ("base", "yarn", "learned"), layers: int = 4, heads: int = 6
) -> Run:
    """Models, two of which are checkpoints of one training, beside trained windows, scaling theorems and a training."""
    with TemporaryDirectory() as aside:
        synthetic = synthetic_run(Path(aside), models, probes=("measure", *ROWS), layers=layers, heads=heads)
        tables = {name: synthetic.table(name) for name in synthetic.tables}
    manifest = synthetic_manifest(models, layers, heads, groups=2)
    for step, model in enumerate(manifest["models"][1:], 1):
        model["step"] = 10 * step
    with RunWriter.open(folder, "whole", {"whole": True}) as writer:
        writer.add("all", {**without_models(), **tables})
        return Run.open(writer.commit(["all"], manifest).path)


def without_models() -> dict[str, pd.DataFrame]:
    """Tables of what is measured of no stored model."""
    schemes, widths, seeds = ("fixed", "learned", "partial", "nope"), (4, 16, 64), (0, 1)
    window = pd.DataFrame(product(schemes, widths, seeds), columns=["scheme", "width", "seed"])
    window = window.assign(center=64, accuracy=0.5 + window["width"] / 200, loss=0.5, steps=60)
    window = window.assign(frequency_mass=2 / window["width"], dominant_theta=1 / window["width"])
    pairs = pd.DataFrame(
        product(schemes, widths, seeds, range(2), range(1, 128, 3)),
        columns=["scheme", "width", "seed", "pair", "distance"],
    )
    pairs["theta"] = 0.1 ** pairs["pair"]
    pairs["logit"] = np.cos(pairs["theta"] * (pairs["distance"] - 64))
    regimes, lengths = {"i": 0.9, "ii": 0.5, "iii": 0.0}, (100, 1000, 10_000)
    scaling = pd.DataFrame(
        [("nope", regime, e, 2.0, n, seed) for (regime, e), n, seed in product(regimes.items(), lengths, seeds)],
        columns=["scheme", "regime", "exponent", "beta", "context_length", "seed"],
    )
    scaling = scaling.assign(scale=1.0, target=scaling["context_length"] ** scaling["exponent"])
    scaling["ess"] = scaling["target"] * (1 + 1 / np.log(scaling["context_length"]))
    scaling["ratio"] = scaling["ess"] / scaling["target"]
    steps = pd.DataFrame({"adapter": "x", "step": range(6), "context_length": 64, "tokens": 48})
    training = steps.assign(loss=3 - 0.1 * steps["step"], rate=1.0)
    held_out = steps.merge(pd.DataFrame({"position": [15, 31, 63]}), how="cross").assign(doc="d")
    held_out["nll"] = 3 - 0.1 * held_out["step"] - 0.01 * held_out["position"]
    return {"window": window, "window_pairs": pairs, "scaling": scaling, "training": training, "validation": held_out}
