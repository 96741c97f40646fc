"""Attention to the first and last keys only, whose cost grows with their number and not with the text.

Axes: B batch, H query heads, Lq queries, Lk keys, dv value dimension.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope.attention.kernel import ROWS_PER_BLOCK, AttentionVariant, attend, attend_block
from headscope.errors import UnsupportedModel


def streaming_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, sink: int, recent: int, first_key: int = 0
) -> Tensor:
    """Attention of the last Lq of Lk keys to the first `sink` keys of the text and the `recent` keys up to each query.

    Returns [B, H, Lq, dv] at a cost of O(Lq (sink + recent)). Keys keep their positions; a window or chunk of the
    variant hides further keys.
    """
    if variant.chosen is not None:
        raise UnsupportedModel(
            f"heads cannot stream in texts of {k.shape[2]:,} tokens: the model's indexer chooses their keys. Use texts "
            "so short that it chooses all"
        )
    first = k.shape[2] - q.shape[2]
    outs = []
    for start in range(0, q.shape[2], ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, q.shape[2])
        low = max(0, first + start - recent + 1)
        sinks, recents = torch.arange(min(max(0, sink - first_key), low)), torch.arange(low, first + stop)
        columns = torch.cat((sinks, recents)).to(q.device)
        i = torch.arange(first + start, first + stop, device=q.device)[:, None]
        visible = (columns <= i) & ((columns + first_key < sink) | (i - columns < recent))
        if variant.window is not None:
            visible &= columns > i - variant.window
        if variant.chunk_size is not None:
            visible &= (columns + first_key) // variant.chunk_size == (i + first_key) // variant.chunk_size
        block = (q[:, :, start:stop], k[:, :, columns], v[:, :, columns], variant)
        outs.append(attend_block(*block, False, visible)[0])
    return torch.cat(outs, 2)


@dataclass(frozen=True)
class StreamingGroups:
    """KV groups of a layer whose query heads stream: they see the first `sink` and the last `recent` keys only."""

    kv_groups: tuple[int, ...]
    sink: int
    recent: int


def attend_partly_streaming(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, streaming: StreamingGroups, first_key: int = 0
) -> Tensor:
    """Head outputs [B, H, Lq, dv] with streaming attention in some KV groups and causal attention in the others.

    Keys and values that a streaming group does not see are never read.
    """
    streams = torch.zeros(k.shape[1], dtype=torch.bool, device=q.device)
    streams[list(streaming.kv_groups)] = True
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    for groups, is_streaming in ((~streams, False), (streams, True)):
        if not groups.any():
            continue
        heads = groups.repeat_interleave(q.shape[1] // k.shape[1])
        sink = None if variant.sink is None else variant.sink[heads]
        part, part_variant = (q[:, heads], k[:, groups], v[:, groups]), replace(variant, sink=sink)
        if is_streaming:
            out[:, heads] = streaming_attention(*part, part_variant, streaming.sink, streaming.recent, first_key)
        else:
            out[:, heads] = attend(*part, None, part_variant, 0.0, False, first_key)[0]
    return out
