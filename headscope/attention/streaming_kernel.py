"""Attention to the first and last keys only, whose cost grows with their number and not with the text.

Axes: B batch, H query heads, Lq queries, Lk keys, dv value dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.kernel import ROWS_PER_BLOCK, AttentionVariant, attend_block
from headscope.attention.record import AttentionRecord, ChoiceKind, LogitEdit
from headscope.errors import UnsupportedModel


@dataclass(frozen=True)
class StreamingKind(ChoiceKind):
    """Chooses the first `sink` and the last `recent` keys; heads that only stream read no other keys.

    Values of `sink` and `recent` are tokens (Xiao et al. 2024).
    """

    sink: int
    recent: int

    @property
    def name(self) -> str:
        return f"streaming:{self.sink}+{self.recent}"

    def choose(self, record: AttentionRecord, rows: Tensor, keys: slice, logits: Tensor, edit: LogitEdit) -> Tensor:
        index = torch.arange(keys.start, keys.stop, device=rows.device)
        distance = record.query_key_index[rows][:, None] - index
        return ((index + record.first_key < self.sink) | (distance < self.recent))[None]


def streaming_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, sink: int, recent: int, first_key: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of the last Lq of Lk keys to the first `sink` keys of the text and the `recent` keys up to each query.

    Returns outputs [B, H, Lq, dv] and the log-sum-exp [B, H, Lq] at a cost of O(Lq (sink + recent)). Keys keep their
    positions; a window or chunk of the variant hides further keys.
    """
    if variant.chosen is not None:
        raise UnsupportedModel(
            f"heads cannot stream in texts of {k.shape[2]:,} tokens: the model's indexer chooses their keys. Use texts "
            "so short that it chooses all"
        )
    first = k.shape[2] - q.shape[2]
    outs, lses = [], []
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
        out, lse = attend_block(*block, False, visible)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
