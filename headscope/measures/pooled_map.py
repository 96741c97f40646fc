"""Pooled attention maps: a head's attention pattern at any length, averaged over square blocks of tokens.

With blocks of s = ceil(L / 128) tokens, M[a, b] is the mean over the query rows of block a of their weight on the keys
of block b. Weights are exp(logit - lse) of the same forward pass, with the log-sum-exp that the fused kernel returned.
Rows are visited in tiles and pooled at once, so memory is O(L).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord, Geometry
from headscope.bins import map_blocks
from headscope.measures.row_sampling import query_range

LOGITS_PER_TILE = 2**22
"""Logits in memory at once."""


class PooledMaps:
    """Accumulates the pooled map of every head over one document of `length` tokens."""

    def __init__(self, geometry: Geometry, length: int):
        self.geometry, self.length = geometry, length
        self.block_size, self.blocks = map_blocks(length)
        self._sums_by_layer: dict[int, Tensor] = {}

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        heads, keys = record.q.shape[0], record.k.shape[1]
        sums = self._sums_by_layer.setdefault(record.layer, torch.zeros(heads, self.blocks, self.blocks))
        queries = query_range(record)
        query_blocks = torch.arange(queries.start, queries.stop) // self.block_size
        key_blocks = torch.arange(record.first_key, record.first_key + keys) // self.block_size
        rows_per_tile = max(1, LOGITS_PER_TILE // (heads * keys))
        for rows in torch.split(torch.arange(len(query_blocks)), rows_per_tile):
            first = int(query_blocks[rows[0]])
            in_block = torch.nn.functional.one_hot(query_blocks[rows] - first).to(record.q.device, torch.float32)
            index = rows.to(record.q.device)
            visible_keys = torch.arange(int(record.query_key_index[index[-1]]) + 1, device=index.device)
            weights = (record.masked_logits(index, visible_keys) - record.lse[:, index, None]).exp_()
            pooled = (in_block.mT @ weights).cpu()
            sums[:, first : first + pooled.shape[1]].index_add_(2, key_blocks[: pooled.shape[-1]], pooled)

    def compute(self) -> Mapping[int, Tensor]:
        """The maps of all heads [H, blocks, blocks] by layer index, float32: a row sums to 1 minus its sink's share."""
        rows = torch.full((self.blocks,), self.block_size)
        rows[-1] = self.length - self.block_size * (self.blocks - 1)
        return {layer: sums / rows[:, None] for layer, sums in self._sums_by_layer.items()}
