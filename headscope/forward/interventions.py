"""What can be done to one attention head, or to one KV group, of a running model.

An intervention recomputes the output z of the heads of one unit from edited q, k and v; every other head, and the
model itself, stays as it is. Resetting AdaRoPE's parameters is one: since q and k are already rotated, it is a
relative rotation and a ratio of scales. Knows the seam and position schedules, nothing of losses or sweeps.

Shapes within a unit: q and z [B, n, Lq, d] with the n query heads of the unit, k and v [B, 1, Lk, d]. A single
query head gets keys of its own: its siblings keep theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.geometry import Geometry
from headscope.forward.rerotation import key_positions, rotate_pairs, rotation_angles, split_rotary
from headscope.positions.schedule import Schedule

Component = Literal["freq", "scale", "joint"]
WHOLE_GROUP = -1
"""The `head` of a unit that is a whole KV group."""

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, order=True)
class Unit:
    """One KV group of an attention layer, by its index, with all its query heads, or one query head of it."""

    layer: int
    kv_group: int
    head: int = WHOLE_GROUP

    def head_slice(self, geometry: Geometry) -> slice:
        """The query heads of the unit within its layer."""
        if self.head != WHOLE_GROUP:
            return slice(self.head, self.head + 1)
        return slice(self.kv_group * geometry.heads_per_group, (self.kv_group + 1) * geometry.heads_per_group)


def kv_group_units(geometry: Geometry) -> list[Unit]:
    """Every KV group, layer by layer."""
    return [Unit(layer, group) for layer in range(geometry.layers) for group in range(geometry.kv_groups)]


def head_units(geometry: Geometry) -> list[Unit]:
    """Every query head, layer by layer."""
    every = [(layer, head) for layer in range(geometry.layers) for head in range(geometry.heads)]
    return [Unit(layer, head // geometry.heads_per_group, head) for layer, head in every]


class Intervention(Protocol):
    """The new z of a unit's heads, from their z and the call that it was computed in, cut to the unit."""

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor: ...


def unit_theta(schedule: Schedule, unit: Unit) -> Tensor:
    """The frequencies [P] that turn a unit: those of its key group, or those that its layer shares."""
    theta = schedule.theta(unit.layer).detach()
    return theta[unit.kv_group if len(theta) > 1 else 0]


@dataclass(frozen=True, eq=False)
class PositionReset:
    """Position parameters of the unit back from `now`, which the model runs under, to `then` (eqs. AdaFreq, AdaScale).

    freq: q and k turn by (theta_then - theta_now) x position; scale: q is multiplied by the ratio of the query scales
    and of the squared factors of cos and sin; joint: both. The angles are the differences, in float64, of the float32
    angles that the rotation tables hold, so that a reset meets the model rebuilt with these parameters.
    """

    component: Component
    current: Schedule
    target: Schedule
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        q, k = call.q, call.k
        rotates = self.geometry.layer_rotates[unit.layer]
        if self.component != "scale" and rotates:
            at = ((q, call.positions), (k, key_positions(call)))
            q, k = (rotate_pairs(t, self._angle_differences(unit, positions), self.geometry) for t, positions in at)
        if self.component != "freq":
            q = (q.float() * self._query_scale_ratio(unit, call.positions)).to(q.dtype)
            factors = [schedule.factor(unit.layer) for schedule in (self.target, self.current)]
            if rotates and factors[0] != factors[1]:
                before, rotary, after = split_rotary(q, self.geometry)
                scaled = (rotary.float() * (factors[0] / factors[1]) ** 2).to(q.dtype)
                q = torch.cat((before, scaled, after), -1)
        return call.attend(q, k, call.v)

    def _angle_differences(self, unit: Unit, positions: Tensor) -> Tensor:
        """What every pair still has to turn at positions [1|B, L]: [1|B, 1, L, P], float64 rad."""
        then, now = (rotation_angles(unit_theta(schedule, unit), positions) for schedule in (self.target, self.current))
        return then - now

    def _query_scale_ratio(self, unit: Unit, positions: Tensor) -> Tensor:
        """lambda_then / lambda_now of the unit's heads at positions [1|B, Lq]: [1|B, n, Lq, 1]."""
        chosen = unit.head_slice(self.geometry)
        scales = []
        for schedule in (self.target, self.current):
            visible = positions + 1
            scale = schedule.query_scale(unit.layer, visible) if schedule.scales_queries else torch.ones(1, 1, 1)
            scales.append(scale.detach().to(positions.device).expand(-1, self.geometry.heads, -1)[:, chosen])
        return (scales[0] / scales[1])[..., None]


def zero_ablation(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
    """The heads say nothing: zeros in their slice of o_proj's input."""
    return torch.zeros_like(z)


def mean_ablation(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
    """The heads say the same everywhere: their mean over the positions of the document [ours]."""
    return z.float().mean(2, keepdim=True).to(z.dtype).expand_as(z)


def uniform_attention(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
    """The heads attend to all visible keys alike: queries of zero. Not the same as zero: they still speak."""
    return call.attend(torch.zeros_like(call.q), call.k, call.v)


ABLATIONS: dict[str, Intervention] = {"zero": zero_ablation, "mean": mean_ablation, "uniform": uniform_attention}
"""Interventions by name, for any model."""


def qkv_intervention(edit: Callable[[Tensor, Tensor, Tensor, int], QKV]) -> Intervention:
    """A user's edit (q, k, v, layer) -> (q, k, v), shapes as above, as an intervention."""

    def intervene(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        return call.attend(*edit(call.q, call.k, call.v, unit.layer))

    return intervene


def layer_output_edit(intervention: Intervention, units: Sequence[Unit], geometry: Geometry) -> backend.OutputEdit:
    """The intervention on some units of one layer, none of which share a head, as a change for the seam."""

    def change(z: Tensor, call: backend.AttentionCall) -> Tensor:
        changed = z.clone()
        for unit in units:
            chosen, key = unit.head_slice(geometry), slice(unit.kv_group, unit.kv_group + 1)
            changed[:, chosen] = intervention(z[:, chosen], call.for_heads(chosen, key), unit)
        return changed

    return change
