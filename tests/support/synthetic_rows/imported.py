"""Synthetic rows of the imported probe."""

from collections.abc import Iterator

import numpy as np

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows
from probes.imported.declaration import IMPORTED


def synthetic_cells(sizes: Sizes, model: str, number: int) -> Iterator[tuple[str, dict[str, Rows]]]:
    """Scores that fall with the growth exponent, as a retrieval score does."""
    noise = np.random.default_rng([sizes.seed, number]).normal(0, 0.05, len(sizes.units))
    keys = {name: sizes.units[name].to_numpy() for name in ("layer", "head", "kv_group")}
    yield "scores", {IMPORTED.name: {"model": model, **keys, "score": 1 - sizes.units["growth"].to_numpy() + noise}}
