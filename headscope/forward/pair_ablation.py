"""What can be taken from some rotary pairs of a head: their part of the logit, or their rotation alone.

Interventions as in `interventions`. Which pairs may differ by layer, since layers may turn by different frequencies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.geometry import Geometry
from headscope.forward.interventions import Unit, theta_of
from headscope.forward.rerotation import angles, key_positions, parted, turned
from headscope.positions.schedule import Schedule


@dataclass(frozen=True, eq=False)
class PairsZero:
    """The chosen `pairs` [T, P], bool, add nothing to the logit: their queries are zero."""

    pairs: Tensor
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.Call, unit: Unit) -> Tensor:
        chosen = self.pairs[unit.layer].to(call.q.device)
        dims = torch.cat((chosen, chosen)) if self.geometry.layout == "half" else chosen.repeat_interleave(2)
        before, rotary, after = parted(call.q, self.geometry)
        return call.attend(torch.cat((before, rotary.masked_fill(dims, 0), after), -1), call.k, call.v)


@dataclass(frozen=True, eq=False)
class PairsStill:
    """The chosen `pairs` [T, P], bool, keep their content and lose their position: q and k are turned back from `now`,
    which the model runs under. A factor on cos and sin stays."""

    pairs: Tensor
    now: Schedule
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.Call, unit: Unit) -> Tensor:
        if not self.geometry.rotates[unit.layer]:
            return z
        theta = theta_of(self.now, unit)
        theta = theta * self.pairs[unit.layer].to(theta.device)
        q, k = (
            turned(t, -angles(theta, at), self.geometry)
            for t, at in ((call.q, call.positions), (call.k, key_positions(call)))
        )
        return call.attend(q, k, call.v)
