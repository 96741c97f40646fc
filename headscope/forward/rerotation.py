"""Rotate rotary pairs that are already rotated by further angles; other dimensions are unchanged."""

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.record import Geometry


def split_rotary(t: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Split [..., d] into the dimensions before the rotary ones, the rotary ones, and those after."""
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    return t[..., :start], t[..., start:end], t[..., end:]


def rotate_pairs(t: Tensor, angles: Tensor, geometry: Geometry) -> Tensor:
    """Rotate each pair of q or k [B, heads, L, d] by `angles` [1|B, 1, L, P] in rad, in the direction of RoPE."""
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
