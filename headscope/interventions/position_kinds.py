"""Edits of q and k by their rotation, and of keys and values by a quantised cache.

Resetting AdaRoPE's parameters is an edit: q and k are already rotated, so a reset is a relative rotation and a ratio of
query scales.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.edits import Place, TensorKind
from headscope.attention.geometry import Geometry
from headscope.interventions.kinds import Targets
from headscope.positions.schedule import Schedule

Component = Literal["freq", "scale", "joint"]


@dataclass(frozen=True, eq=False)
class PositionReset(TensorKind):
    """Reset the position parameters of heads from the `current` to the `target` schedule (eqs. AdaFreq, AdaScale).

    freq: q and k are rotated by (theta_target - theta_current) x position; scale: q is multiplied by the ratio of the
    query scales and of the squared factors of cos and sin; joint: both. The angles are float64 differences of the
    float32 angles in the rotation tables, so a reset matches the model rebuilt with these parameters. Only an
    indexer of the model (DeepSeek V3.2) keeps the keys that it chose under the current schedule.
    """

    component: Component
    current: Schedule
    target: Schedule
    geometry: Geometry

    @property
    def name(self) -> str:
        return f"reset of {self.component}"

    @property
    def targets(self) -> Targets:
        return ("q",) if self.component == "scale" else ("q", "k")

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        layer = place.layer
        rotates, geometry = self.geometry.layer_rotates[layer], self.geometry.at_layer(layer)
        if self.component != "scale" and rotates:
            angles = [
                rotation_angles(schedule.theta(layer).detach(), place) for schedule in (self.target, self.current)
            ]
            t = rotate_pairs(t, angles[0] - angles[1], geometry)
        if self.component != "freq" and place.target == "q":
            t = (t.float() * self._query_scale_ratio(place)).to(t.dtype)
            factors = [schedule.attention_factor(layer) for schedule in (self.target, self.current)]
            if rotates and factors[0] != factors[1]:
                before, rotary, after = split_rotary(t, geometry)
                scaled = (rotary.float() * (factors[0] / factors[1]) ** 2).to(t.dtype)
                t = torch.cat((before, scaled, after), -1)
        return t

    def _query_scale_ratio(self, place: Place) -> Tensor:
        """lambda_target / lambda_current of the heads at their positions, [n, L, 1]."""
        visible, device = place.positions + 1, place.positions.device
        scales = []
        for schedule in (self.target, self.current):
            scale = schedule.query_scale(place.layer, visible) if schedule.scales_queries else torch.ones(1, 1, 1)
            scale = without_waiting(device, scale.detach()).expand(len(visible), place.head_count, -1)
            sequences = place.sequences if len(visible) > 1 else torch.zeros_like(place.sequences)
            scales.append(scale[without_waiting(device, sequences), without_waiting(device, place.heads)])
        return (scales[0] / scales[1])[..., None]


@dataclass(frozen=True, eq=False)
class PairZeroAblation(TensorKind):
    """Zero the queries of the selected `pairs` [layers, P] (bool), so that they contribute nothing to the logits."""

    pairs: Tensor
    geometry: Geometry
    name: ClassVar[str] = "pairs zero"
    targets: ClassVar[Targets] = ("q",)

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        geometry = self.geometry.at_layer(place.layer)
        selected = without_waiting(t.device, self.pairs[place.layer, : geometry.pairs])
        dims = torch.cat((selected, selected)) if geometry.rotary_layout == "half" else selected.repeat_interleave(2)
        before, rotary, after = split_rotary(t, geometry)
        return torch.cat((before, rotary.masked_fill(dims, 0), after), -1)


@dataclass(frozen=True, eq=False)
class PairUnrotation(TensorKind):
    """Undo the rotation of the selected `pairs` [layers, P] (bool) of q and k under the `current` schedule.

    A factor on cos and sin stays.
    """

    pairs: Tensor
    current: Schedule
    geometry: Geometry
    name: ClassVar[str] = "pairs unrotated"
    targets: ClassVar[Targets] = ("q", "k")

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        if not self.geometry.layer_rotates[place.layer]:
            return t
        geometry, theta = self.geometry.at_layer(place.layer), self.current.theta(place.layer).detach()
        theta = theta * without_waiting(theta.device, self.pairs[place.layer, : geometry.pairs])
        return rotate_pairs(t, -rotation_angles(theta, place), geometry)


TOKENS_PER_GROUP = 32
"""Consecutive tokens whose keys share a scale, as in KIVI."""
QUANTIZATION_BITS = {"kv-int8": 8, "kv-int4": 4}
"""Bits of each quantised number, by component."""


@dataclass(frozen=True)
class KVQuantization(TensorKind):
    """Attend to keys and values as a quantised cache would return them (KIVI, Liu et al. 2024).

    Each number is rounded to one of 2^bits levels from minimum to maximum: of a channel over 32 consecutive tokens for
    keys, of a token over its channels for values.
    """

    bits: int
    targets: ClassVar[Targets] = ("k", "v")

    @property
    def name(self) -> str:
        return f"kv-int{self.bits}"

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        if place.target == "v":
            return fake_quantize(t, self.bits, dim=-1)
        return torch.cat(
            [fake_quantize(group, self.bits, dim=-2) for group in torch.split(t, TOKENS_PER_GROUP, -2)], -2
        )


def fake_quantize(values: Tensor, bits: int, dim: int) -> Tensor:
    """Round to 2^bits equally spaced levels from the minimum to the maximum along `dim`; shape and dtype stay."""
    exact = values.float()
    low, high = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    rounded: Tensor = low + step * ((exact - low) / step).round()
    return rounded.to(values.dtype)


def split_rotary(t: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Split [..., d] of a layer with this geometry into the dimensions before the rotary ones, those, and the rest."""
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    return t[..., :start], t[..., start:end], t[..., end:]


def rotate_pairs(t: Tensor, angles: Tensor, geometry: Geometry) -> Tensor:
    """Rotate each pair of q or k [..., L, d] by `angles` [..., L, P] in rad, in the direction of RoPE.

    `geometry` is that of the layer.
    """
    pairs = geometry.pairs
    cos, sin = angles.cos().float(), angles.sin().float() * geometry.rotation_direction
    before, rotary, after = split_rotary(t, geometry)
    rotary = rotary.float()
    if geometry.rotary_layout == "half":
        x, y = rotary[..., :pairs], rotary[..., pairs:]
        rotated = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    else:
        x, y = rotary[..., 0::2], rotary[..., 1::2]
        rotated = torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)
    return torch.cat((before, rotated.to(t.dtype), after), -1)


def rotation_angles(theta: Tensor, place: Place) -> Tensor:
    """Angles [n, L, P] in rad of the frequencies `theta` [1|G, P] of a layer at the positions of vectors.

    They are rounded to float32 like the model's rotation tables, then float64, so differences match a model that is
    rebuilt with other frequencies.
    """
    positions = place.positions_of().float()
    return (positions[..., None] * place.rows_of(without_waiting(positions.device, theta))[:, None]).double()
