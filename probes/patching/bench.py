"""Cost of activation patching relative to the plain forward pass: estimates of all heads, and exact patches."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.bench.lens import text_pair
from headscope.forward.interventions import head_units
from headscope.patching.activation_patching import PatchingReplay
from headscope.patching.layer_patching import LAYER_ACTIVATIONS, LayerPatching, inspect_layer_parts
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
    replay = PatchingReplay(model, pair, "logit_diff", RESIDUAL_STREAM_MEMORY_BYTES)
    layers = sorted({(2 * n + 1) * model.geometry.layers // (2 * BENCHMARK_LAYERS) for n in range(BENCHMARK_LAYERS)})
    units = [unit for unit in head_units(model.geometry) if unit.layer in layers]

    def plain() -> None:
        with torch.no_grad():
            model.module(pair.clean[:, :length], use_cache=False)

    def estimate() -> None:
        new_replay = PatchingReplay(model, pair, "logit_diff", RESIDUAL_STREAM_MEMORY_BYTES)
        with new_replay.capturing():
            new_replay.estimate(["z"], "denoising", [None])

    def patch() -> None:
        with replay.capturing():
            list(replay.patch("z", "denoising", units, [None]))

    parts = inspect_layer_parts(model, pair.clean)

    def patch_layers() -> None:
        patching = LayerPatching(replay, parts)
        with replay.capturing():
            for activation in LAYER_ACTIVATIONS:
                list(patching.patch(activation, "denoising", layers, [None]))

    return {
        "plain forward with logits": plain,
        f"patching: both runs of a pair, all heads estimated (bound: {MAX_ESTIMATE_RATIO:g})": estimate,
        f"patching: {len(units)} heads patched exactly, {len(layers)} evenly spaced layers (bound: "
        f"{MAX_EXACT_RATIO * len(units):g})": patch,
        f"patching: {len(layers)} layers, {', '.join(LAYER_ACTIVATIONS)} patched exactly (bound: "
        f"{MAX_LAYER_RATIO * len(layers) * len(LAYER_ACTIVATIONS):g})": patch_layers,
    }
