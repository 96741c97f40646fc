"""Interventions on one attention head, or one KV group, of a running model.

An intervention recomputes the output z of the heads of one unit from edited q, k and v. All other heads and the model
itself stay unchanged. Resetting AdaRoPE's parameters is an intervention: q and k are already rotated, so a reset is a
relative rotation and a ratio of query scales.

Shapes within a unit: q and z [B, n, Lq, d] with the n query heads of the unit, k and v [B, 1, Lk, d]. An edit of the
keys of a single query head does not change those of the other heads in its KV group.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.record import Geometry
from headscope.measures.row_sampling import without_waiting
from headscope.positions.schedule import Schedule
from headscope.streaming import StreamingWindow

Component = Literal["freq", "scale", "joint"]
WHOLE_GROUP = -1
"""Value of `head` for a unit that is a whole KV group."""

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, order=True)
class Unit:
    """One KV group with all its query heads, or one query head. `layer` is the index of the attention layer."""

    layer: int
    kv_group: int
    head: int = WHOLE_GROUP

    def head_slice(self, geometry: Geometry) -> slice:
        """The query heads of the unit within its layer."""
        if self.head != WHOLE_GROUP:
            return slice(self.head, self.head + 1)
        size = geometry.heads_per_group(self.layer)
        return slice(self.kv_group * size, (self.kv_group + 1) * size)


def kv_group_units(geometry: Geometry) -> list[Unit]:
    """Every KV group, layer by layer."""
    return [Unit(layer, group) for layer, groups in enumerate(geometry.layer_kv_groups) for group in range(groups)]


def head_units(geometry: Geometry) -> list[Unit]:
    """Every query head, layer by layer."""
    return [head_unit(geometry, layer, head) for layer, n in enumerate(geometry.layer_heads) for head in range(n)]


def head_unit(geometry: Geometry, layer: int, head: int) -> Unit:
    """One query head as a unit; `layer` is the index of its attention layer."""
    return Unit(layer, geometry.kv_group(layer, head), head)


class Intervention(Protocol):
    """Computes the new z of a unit's heads from their z and their attention call."""

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor: ...


def unit_theta(schedule: Schedule, unit: Unit) -> Tensor:
    """The rotary frequencies [P] of a unit: those of its KV group, or those that its layer shares."""
    theta = schedule.theta(unit.layer).detach()
    return theta[unit.kv_group if len(theta) > 1 else 0]


@dataclass(frozen=True, eq=False)
class PositionReset:
    """Reset the position parameters of a unit from the `current` to the `target` schedule (eqs. AdaFreq, AdaScale).

    freq: q and k are rotated by (theta_target - theta_current) x position; scale: q is multiplied by the ratio of the
    query scales and of the squared factors of cos and sin; joint: both. The angles are float64 differences of the
    float32 angles in the rotation tables, so a reset matches the model rebuilt with these parameters. Only an
    indexer of the model (DeepSeek V3.2) keeps the keys that it chose under the current schedule.
    """

    component: Component
    current: Schedule
    target: Schedule
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        q, k = call.q, call.k
        rotates, geometry = self.geometry.layer_rotates[unit.layer], self.geometry.at_layer(unit.layer)
        if self.component != "scale" and rotates:
            q = rotate_pairs(q, self._angle_differences(unit, call.positions), geometry)
            k = rotate_pairs(k, self._angle_differences(unit, key_positions(call)), geometry)
        if self.component != "freq":
            q = (q.float() * self._query_scale_ratio(unit, call.positions)).to(q.dtype)
            factors = [schedule.attention_factor(unit.layer) for schedule in (self.target, self.current)]
            if rotates and factors[0] != factors[1]:
                before, rotary, after = split_rotary(q, geometry)
                scaled = (rotary.float() * (factors[0] / factors[1]) ** 2).to(q.dtype)
                q = torch.cat((before, scaled, after), -1)
        return call.attend(q, k, call.v)

    def _angle_differences(self, unit: Unit, positions: Tensor) -> Tensor:
        """Angle differences of every pair at positions [1|B, L]: [1|B, 1, L, P], float64, rad."""
        target, current = (
            rotation_angles(unit_theta(schedule, unit), positions) for schedule in (self.target, self.current)
        )
        return target - current

    def _query_scale_ratio(self, unit: Unit, positions: Tensor) -> Tensor:
        """lambda_target / lambda_current of the unit's heads at positions [1|B, Lq]: [1|B, n, Lq, 1]."""
        heads = unit.head_slice(self.geometry)
        scales = []
        for schedule in (self.target, self.current):
            visible = positions + 1
            scale = schedule.query_scale(unit.layer, visible) if schedule.scales_queries else torch.ones(1, 1, 1)
            layer_heads = self.geometry.layer_heads[unit.layer]
            scales.append(scale.detach().to(positions.device).expand(-1, layer_heads, -1)[:, heads])
        return (scales[0] / scales[1])[..., None]


def zero_ablation(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
    """Zero ablation: set the heads' outputs to zero."""
    return torch.zeros_like(z)


def mean_ablation(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
    """Mean ablation: set the heads' outputs to their mean over the positions of the document [ours]."""
    return z.float().mean(2, keepdim=True).to(z.dtype).expand_as(z)


def uniform_attention(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
    """Uniform attention over all visible keys, from queries of zero; the outputs are not zero."""
    return call.attend(torch.zeros_like(call.q), call.k, call.v)


@dataclass(frozen=True)
class StreamingAttention:
    """Streaming attention: the heads see the first and the most recent tokens only."""

    window: StreamingWindow

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        return call.attend_streaming(self.window.sink, self.window.recent)


TOKENS_PER_GROUP = 32
"""Consecutive tokens whose keys share a scale, as in KIVI."""
QUANTIZATION_BITS = {"kv-int8": 8, "kv-int4": 4}
"""Bits of each quantised number, by component."""


@dataclass(frozen=True, eq=False)
class KVQuantization:
    """Attend to keys and values as a quantised cache would return them (KIVI, Liu et al. 2024).

    Each number is rounded to one of 2^bits levels from minimum to maximum: of a channel over 32 consecutive tokens for
    keys, of a token over its channels for values.
    """

    bits: int
    head_dim: int
    """Dimensions of a key without those that hold a bias."""

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        keys, bias = call.k[..., : self.head_dim], call.k[..., self.head_dim :]
        groups = [fake_quantize(group, self.bits, dim=2) for group in torch.split(keys, TOKENS_PER_GROUP, dim=2)]
        return call.attend(call.q, torch.cat((torch.cat(groups, 2), bias), -1), fake_quantize(call.v, self.bits, dim=3))


def fake_quantize(values: Tensor, bits: int, dim: int) -> Tensor:
    """Round to 2^bits equally spaced levels from the minimum to the maximum along `dim`; shape and dtype stay."""
    exact = values.float()
    low, high = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
    rounded: Tensor = low + step * ((exact - low) / step).round()
    return rounded.to(values.dtype)


ABLATIONS: dict[str, Intervention] = {"zero": zero_ablation, "mean": mean_ablation, "uniform": uniform_attention}
"""Ablations by name, for any model."""


def qkv_intervention(edit: Callable[[Tensor, Tensor, Tensor, int], QKV]) -> Intervention:
    """An intervention from a user's edit (q, k, v, layer) -> (q, k, v), with the shapes above.

    Running it raises BadInput if the edit changes a shape, dtype or device, or returns values that are not finite.
    """

    def intervene(z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        inputs = (call.q, call.k, call.v)
        q, k, v = backend.check_edited(edit, unit.layer, inputs, edit(*inputs, unit.layer))
        return call.attend(q, k, v)

    return intervene


def layer_output_edit(intervention: Intervention, units: Sequence[Unit], geometry: Geometry) -> backend.OutputEdit:
    """An output edit for the attention backend that applies the intervention to disjoint units of one layer."""
    return _output_edit([(intervention, unit, slice(None)) for unit in units], geometry)


def batch_output_edit(changes: Sequence[Sequence[tuple[Intervention, Unit]]], geometry: Geometry) -> backend.OutputEdit:
    """An output edit of a batch of runs: `changes` has the changes of each run, of disjoint units of one layer.

    A change that several runs share is computed for all of them at once.
    """
    runs_by_change: dict[tuple[Intervention, Unit], list[int]] = defaultdict(list)
    for run, members in enumerate(changes):
        for change in dict.fromkeys(members):
            runs_by_change[change].append(run)
    return _output_edit(
        [
            (*change, slice(None) if len(runs) == len(changes) else torch.tensor(runs))
            for change, runs in runs_by_change.items()
        ],
        geometry,
    )


def _output_edit(
    changes: Sequence[tuple[Intervention, Unit, slice | Tensor]], geometry: Geometry
) -> backend.OutputEdit:
    """An output edit that applies interventions to units of one layer, each in some sequences of the batch."""

    def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
        output = z.clone()
        for intervention, unit, runs in changes:
            heads, group = unit.head_slice(geometry), slice(unit.kv_group, unit.kv_group + 1)
            runs = runs if isinstance(runs, slice) else without_waiting(z.device, runs)
            part = call.for_heads(heads, group).for_sequences(runs)
            output[runs, heads] = intervention(z[:, heads][runs], part, unit)
        return output

    return edit


def edit_by_run(edits: Sequence[backend.OutputEdit]) -> backend.OutputEdit:
    """An output edit of a batch of runs that applies one of `edits` to each."""

    def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
        runs = [slice(number, number + 1) for number in range(len(edits))]
        return torch.cat([run_edit(z[run], call.for_sequences(run)) for run_edit, run in zip(edits, runs, strict=True)])

    return edit


@dataclass(frozen=True, eq=False)
class PairZeroAblation:
    """Zero the queries of the selected `pairs` [layers, P] (bool), so that they contribute nothing to the logits."""

    pairs: Tensor
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        geometry = self.geometry.at_layer(unit.layer)
        selected = self.pairs[unit.layer, : geometry.pairs].to(call.q.device)
        dims = torch.cat((selected, selected)) if geometry.rotary_layout == "half" else selected.repeat_interleave(2)
        before, rotary, after = split_rotary(call.q, geometry)
        return call.attend(torch.cat((before, rotary.masked_fill(dims, 0), after), -1), call.k, call.v)


@dataclass(frozen=True, eq=False)
class PairUnrotation:
    """Undo the rotation of the selected `pairs` [layers, P] (bool) of q and k under the `current` schedule.

    A factor on cos and sin stays.
    """

    pairs: Tensor
    current: Schedule
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        if not self.geometry.layer_rotates[unit.layer]:
            return z
        geometry, theta = self.geometry.at_layer(unit.layer), unit_theta(self.current, unit)
        theta = theta * self.pairs[unit.layer, : geometry.pairs].to(theta.device)
        q = rotate_pairs(call.q, -rotation_angles(theta, call.positions), geometry)
        k = rotate_pairs(call.k, -rotation_angles(theta, key_positions(call)), geometry)
        return call.attend(q, k, call.v)


def split_rotary(t: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Split [..., d] of a layer with this geometry into the dimensions before the rotary ones, those, and the rest."""
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    return t[..., :start], t[..., start:end], t[..., end:]


def rotate_pairs(t: Tensor, angles: Tensor, geometry: Geometry) -> Tensor:
    """Rotate each pair of q or k [B, heads, L, d] by `angles` [1|B, 1, L, P] in rad, in the direction of RoPE.

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


def rotation_angles(theta: Tensor, positions: Tensor) -> Tensor:
    """Angles of frequencies [P] at positions [1|B, L]: [1|B, 1, L, P] in rad.

    They are rounded to float32 like the model's rotation tables, then float64, so differences match a model that is
    rebuilt with other frequencies.
    """
    return (positions[:, None, :, None].float() * theta.to(positions.device)).double()


def key_positions(call: backend.AttentionCall) -> Tensor:
    """Positions [1|B, Lk] of the keys; the last key is at the position of the last query."""
    keys = call.k.shape[2]
    return call.positions[:, -1:] - (keys - 1) + torch.arange(keys, device=call.positions.device)
