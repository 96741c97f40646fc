"""What can be taken from some rotary pairs of a head: their part of the logit, or their rotation alone.

Interventions as in `interventions`. Which pairs may differ by layer, since layers may turn by different frequencies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.geometry import Geometry
from headscope.forward.interventions import Unit, unit_theta
from headscope.forward.rerotation import key_positions, rotate_pairs, rotation_angles, split_rotary
from headscope.positions.schedule import Schedule


@dataclass(frozen=True, eq=False)
class PairsZeroed:
    """The chosen `pairs` [T, P], bool, add nothing to the logit: their queries are zero."""

    pairs: Tensor
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        chosen = self.pairs[unit.layer].to(call.q.device)
        dims = torch.cat((chosen, chosen)) if self.geometry.rotary_layout == "half" else chosen.repeat_interleave(2)
        before, rotary, after = split_rotary(call.q, self.geometry)
        return call.attend(torch.cat((before, rotary.masked_fill(dims, 0), after), -1), call.k, call.v)


@dataclass(frozen=True, eq=False)
class PairsUnrotated:
    """The chosen `pairs` [T, P], bool, keep their content and lose their position: q and k are turned back from `now`,
    which the model runs under. A factor on cos and sin stays."""

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
