"""Cost of activation patching relative to the plain forward pass: estimates of all heads, and exact patches."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lens import text_pair
from headscope.interventions.heads import head_units
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.parts import PART_NAMES, inspect_layer_parts
from headscope.positions.model import Model

MAX_ESTIMATE_RATIO, MAX_EXACT_RATIO = 5.0, 0.6
"""Bounds in forward passes: of the estimates of all heads of a pair, and of one exact patch."""
MAX_LAYER_RATIO = 1.0
"""Bound of one exact patch of a layer, which also runs the layer in the other run."""
BENCHMARK_LAYERS = 3
"""Evenly spaced layers whose heads are patched exactly; the cost of a sweep is proportional to its heads."""
RESIDUAL_STREAM_MEMORY_BYTES = 2**31
"""Memory for residual streams, in bytes."""


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The plain forward pass with logits, estimates of all heads of a new pair, and exact patches of some heads
    and layers.

    The two prompts are one text with another token in the middle. Names give the bounds of the
    ratio.
    """
    pair = text_pair(model, length)
    parts = inspect_layer_parts(model, pair.clean)
    replay = PairRuns(model, pair, "logit_diff", RESIDUAL_STREAM_MEMORY_BYTES, parts)
    layers = sorted({(2 * n + 1) * model.geometry.layers // (2 * BENCHMARK_LAYERS) for n in range(BENCHMARK_LAYERS)})
    units = [unit for unit in head_units(model.geometry) if unit.layer in layers]

    def plain() -> None:
        with torch.no_grad():
            model.module(pair.clean[:, :length], use_cache=False)

    def estimate() -> None:
        new_replay = PairRuns(model, pair, "logit_diff", RESIDUAL_STREAM_MEMORY_BYTES)
        with new_replay.capturing():
            every = head_units(model.geometry)
            new_replay.estimate("denoising", [new_replay.patch("z", "denoising", [unit]) for unit in every])

    def patch() -> None:
        with replay.capturing():
            replay.evaluate("denoising", [replay.patch("z", "denoising", [unit]) for unit in units])

    def patch_layers() -> None:
        with replay.capturing():
            for part in PART_NAMES:
                replay.evaluate("denoising", [replay.patch_part(part, "denoising", layer) for layer in layers])

    return {
        "plain forward with logits": plain,
        f"patching: both runs of a pair, all heads estimated (bound: {MAX_ESTIMATE_RATIO:g})": estimate,
        f"patching: {len(units)} heads patched exactly, {len(layers)} evenly spaced layers (bound: "
        f"{MAX_EXACT_RATIO * len(units):g})": patch,
        f"patching: {len(layers)} layers, {', '.join(PART_NAMES)} patched exactly (bound: "
        f"{MAX_LAYER_RATIO * len(layers) * len(PART_NAMES):g})": patch_layers,
    }
