"""Turn rotary pairs that are already rotated: by how much is wanted, the dimensions that do not rotate left alone.

Knows geometry and frequencies, nothing of heads or losses.
"""

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.geometry import Geometry


def split_rotary(t: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """[..., d] -> the dimensions before those that rotate, these, and the others."""
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    return t[..., :start], t[..., start:end], t[..., end:]


def rotate_pairs(t: Tensor, angles: Tensor, geometry: Geometry) -> Tensor:
    """q or k [B, heads, L, d] with each pair turned by `angles` [1|B, 1, L, P], rad, as growing positions turn it."""
    pairs = geometry.pairs
    cos, sin = angles.cos().float(), angles.sin().float() * geometry.rotation_direction
    before, rotary, after = split_rotary(t, geometry)
    rotary = rotary.float()
    if geometry.rotary_layout == "half":
        x, y = rotary[..., :pairs], rotary[..., pairs:]
        moved = torch.cat((x * cos - y * sin, y * cos + x * sin), -1)
    else:
        x, y = rotary[..., 0::2], rotary[..., 1::2]
        moved = torch.stack((x * cos - y * sin, y * cos + x * sin), -1).flatten(-2)
    return torch.cat((before, moved.to(t.dtype), after), -1)


def rotation_angles(theta: Tensor, positions: Tensor) -> Tensor:
    """What frequencies [P] turn at positions [1|B, L]: [1|B, 1, L, P], rad. In float32 as rotation tables hold them,
    then float64, so that a turn meets the model that was built with other frequencies."""
    return (positions[:, None, :, None].float() * theta.to(positions.device)).double()


def key_positions(call: backend.AttentionCall) -> Tensor:
    """Positions [1|B, Lk] of the keys, the last of which is the last query's own."""
    keys = call.k.shape[2]
    return call.positions[:, -1:] - (keys - 1) + torch.arange(keys, device=call.positions.device)
