"""Split q and k into rotary pairs: each pair is a 2-D plane, and a logit is the sum of what its planes contribute."""

import torch
from torch import Tensor

from headscope.attention.geometry import Geometry


def planes(t: Tensor, geometry: Geometry) -> Tensor:
    """q [H, L, d] or k [G, L, d] -> [2, G x F, H / G (or 1), L], float32, contiguous: x and y of each pair.

    F is d / 2: the rotary pairs first, then the unrotated dimensions, paired in the same layout among themselves.
    """
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    parts = [_split(t[..., start:end], geometry.layout)]
    if end - start < geometry.head_dim:
        parts.append(_split(torch.cat((t[..., :start], t[..., end : geometry.head_dim]), -1), geometry.layout))
    both = torch.cat(parts, -1).float()  # [2, heads, L, F]
    _, heads, length, pairs = both.shape
    grouped = both.view(2, geometry.kv_groups, heads // geometry.kv_groups, length, pairs)
    return grouped.permute(0, 1, 4, 2, 3).reshape(2, geometry.kv_groups * pairs, -1, length)


def _split(t: Tensor, layout: str) -> Tensor:
    """[heads, L, 2F] -> [2, heads, L, F]."""
    half = t.shape[-1] // 2
    if layout == "half":
        return torch.stack((t[..., :half], t[..., half : 2 * half]))
    return torch.stack((t[..., 0 : 2 * half : 2], t[..., 1 : 2 * half : 2]))


def by_head(t: Tensor, geometry: Geometry) -> Tensor:
    """[G x F, H / G] -> [H, F]: undo the grouping of `planes`."""
    return t.view(geometry.kv_groups, geometry.all_pairs, -1).transpose(1, 2).reshape(geometry.heads, -1)
