"""Split q and k into rotary pairs: each pair is a 2-D plane, and a logit is the sum of what its planes contribute."""

import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.measures.tiles import items_per_tile

TOKENS_PER_CHUNK = 4096
"""Tokens that are turned round at once: memory O(TOKENS x d) beyond what is returned."""


def rotary_planes(heads_tensor: Tensor, geometry: Geometry) -> Tensor:
    """q [H, L, d] or k [G, L, d] -> [2, G x F, H / G (or 1), L], float32, contiguous: x and y of each pair.

    F is d / 2: the rotary pairs first, then the unrotated dimensions, paired in the same layout among themselves.
    """
    (heads, length, dim), groups = heads_tensor.shape, geometry.kv_groups
    made = heads_tensor.new_empty(2, groups, geometry.all_pairs, heads // groups, length, dtype=torch.float32)
    size = items_per_tile(heads_tensor.device, TOKENS_PER_CHUNK, heads * dim)
    for cut in (slice(at, at + size) for at in range(0, length, size)):
        both = _pair_coordinates(heads_tensor[:, cut], geometry)  # [2, heads, tokens, F]
        made[..., cut] = both.view(2, groups, heads // groups, *both.shape[2:]).permute(0, 1, 4, 2, 3)
    return made.view(2, groups * geometry.all_pairs, -1, length)


def _pair_coordinates(t: Tensor, geometry: Geometry) -> Tensor:
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    rotary = _split_pairs(t[..., start:end], geometry.rotary_layout)
    if end - start == geometry.head_dim:
        return rotary
    rest = torch.cat((t[..., :start], t[..., end : geometry.head_dim]), -1)
    return torch.cat((rotary, _split_pairs(rest, geometry.rotary_layout)), -1)


def _split_pairs(t: Tensor, layout: str) -> Tensor:
    """[heads, L, 2F] -> [2, heads, L, F]."""
    half = t.shape[-1] // 2
    if layout == "half":
        return torch.stack((t[..., :half], t[..., half : 2 * half]))
    return torch.stack((t[..., 0 : 2 * half : 2], t[..., 1 : 2 * half : 2]))


def planes_by_head(t: Tensor, geometry: Geometry) -> Tensor:
    """[G x F, H / G] -> [H, F]: undo the grouping of `planes`."""
    return t.view(geometry.kv_groups, geometry.all_pairs, -1).transpose(1, 2).reshape(geometry.heads, -1)
