"""Losses under edits of heads: from the whole model, and by replay."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headscope.interventions.edits import edit_units
from headscope.interventions.heads import Unit
from headscope.interventions.replay import Replay
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
    model: Model, schedule: Any, changes: Sequence[tuple[Any, Sequence[Unit]]], ids: Tensor = IDS
) -> list[float]:
    """Mean loss with each kind of edit on its units, one run at a time; the last is that of nothing changed."""
    replay = Replay(model, schedule, ids, memory_bytes=1e9)
    runs = [*([edit_units(kind, units, model.geometry)] for kind, units in changes), ()]
    with replay.capturing():
        replay.record_streams()
        return [losses.double().mean().item() for run in runs for _, losses in replay.losses([run])]
