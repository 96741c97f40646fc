"""Ablation of rotary pairs of a head: of their contribution to the logits, or of their rotation only.

The pairs may differ by layer, because layers may have different frequencies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.record import Geometry
from headscope.forward.interventions import Unit, unit_theta
from headscope.forward.rerotation import key_positions, rotate_pairs, rotation_angles, split_rotary
from headscope.positions.schedule import Schedule


@dataclass(frozen=True, eq=False)
class PairsZeroed:
    """Set the queries of the selected `pairs` [T, P] (bool) to zero, so they contribute nothing to the logits."""

    pairs: Tensor
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        selected = self.pairs[unit.layer].to(call.q.device)
        dims = (
            torch.cat((selected, selected)) if self.geometry.rotary_layout == "half" else selected.repeat_interleave(2)
        )
        before, rotary, after = split_rotary(call.q, self.geometry)
        return call.attend(torch.cat((before, rotary.masked_fill(dims, 0), after), -1), call.k, call.v)


@dataclass(frozen=True, eq=False)
class PairsUnrotated:
    """Undo the rotation of the selected `pairs` [T, P] (bool) of q and k under the `current` schedule. A factor on cos
    and
    sin stays."""

    pairs: Tensor
    current: Schedule
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        if not self.geometry.layer_rotates[unit.layer]:
            return z
        theta = unit_theta(self.current, unit)
        theta = theta * self.pairs[unit.layer].to(theta.device)
        q, k = (
            rotate_pairs(t, -rotation_angles(theta, at), self.geometry)
            for t, at in ((call.q, call.positions), (call.k, key_positions(call)))
        )
        return call.attend(q, k, call.v)
