"""Losses under interventions: from the whole model, and by replay."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headscope.forward.interventions import (
    ABLATIONS,
    Intervention,
    Unit,
    layer_output_edit,
)
from headscope.forward.replay import Replay
from headscope.positions import attached
from headscope.positions.model import Model
from headscope.positions.schedule import Schedule
from support import families

IDS = torch.randint(3, families.VOCAB, (1, 48), generator=torch.Generator().manual_seed(0))


def full_pass_loss(model: Model, schedule: Schedule, ids: Tensor = IDS) -> float:
    """Mean loss of the whole model, float64, by plain means."""
    with attached(model, schedule), torch.no_grad():
        logits = model.module(ids, use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits.double(), ids[0, 1:]).item()


def replay_losses(
    model: Model, schedule: Any, interventions: Sequence[tuple[Intervention, Sequence[Unit]]], ids: Tensor = IDS
) -> list[float]:
    """Mean loss with each intervention on its units; the last is that of nothing changed."""
    replay = Replay(model, schedule, ids, memory_bytes=1e9)
    with replay.capturing():
        replay.record_streams()
        losses = []
        for intervention, units in [*interventions, (ABLATIONS["zero"], [])]:
            layers = {unit.layer for unit in units}
            by_layer = {layer: [unit for unit in units if unit.layer == layer] for layer in layers}
            changes = {layer: layer_output_edit(intervention, at, model.geometry) for layer, at in by_layer.items()}
            losses.append(replay.losses(changes).double().mean().item())
        return losses
