"""Pooled attention maps: a head's attention pattern at any length, averaged over square blocks of tokens.

With blocks of s = ceil(L / 128) tokens, M[a, b] is the mean over the query rows of block a of their weight on the keys
of block b. Weights are exp(logit - lse) of the same forward pass, with the log-sum-exp that the fused kernel returned.
Rows are visited in tiles and pooled at once, so memory is O(L).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.kernels.runtime import attempt, runs_kernels
from headscope.attention.record import AttentionRecord
from headscope.base.bins import map_blocks
from headscope.measures.row_sampling import add_by_cell, copy_together, items_per_tile, query_range, to_device

LOGITS_PER_TILE = 2**22
"""Logits in memory at once on a CPU."""


class PooledMaps:
    """Accumulates the pooled map of every head over one document of `length` tokens."""

    def __init__(self, geometry: Geometry, length: int):
        self.geometry, self.length = geometry, length
        self.block_size, self.blocks = map_blocks(length)
        self._sums_by_layer: dict[int, Tensor] = {}

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        if record.layer not in self._sums_by_layer:
            shape = record.q.shape[0], self.blocks, self.blocks
            self._sums_by_layer[record.layer] = torch.zeros(shape, device=record.q.device)
        sums = self._sums_by_layer[record.layer]
        if not self._add_by_kernel(record, sums):
            add_block_sums(record, sums, self.block_size)

    def _add_by_kernel(self, record: AttentionRecord, sums: Tensor) -> bool:
        """Whether the GPU's kernel has added the record."""
        if not runs_kernels(record):
            return False
        from headscope.attention.kernels.pooled_map import add_pooled_map

        return attempt(add_pooled_map, record, sums, self.block_size) is not None

    def compute(self) -> Mapping[int, Tensor]:
        """The maps of all heads [H, blocks, blocks] by layer index, float32: a row sums to 1 minus its sink's share."""
        rows = torch.full((self.blocks,), self.block_size)
        rows[-1] = self.length - self.block_size * (self.blocks - 1)
        maps = copy_together([*self._sums_by_layer.values()])
        return {layer: of_layer / rows[:, None] for layer, of_layer in zip(self._sums_by_layer, maps, strict=True)}


def add_block_sums(record: AttentionRecord, sums: Tensor, block_size: int) -> Tensor:
    """Add the weights of the record's queries to `sums` [H, blocks, blocks], float32, by blocks of tokens; return them.

    The torch code that the kernel `add_pooled_map` replaces on a GPU.
    """
    heads, keys = record.q.shape[0], record.k.shape[1]
    device, queries = record.q.device, query_range(record)
    query_blocks = np.arange(queries.start, queries.stop) // block_size
    key_blocks = np.arange(record.first_key, record.first_key + keys) // block_size
    rows_per_tile = items_per_tile(device, max(1, LOGITS_PER_TILE // (heads * keys)), heads * keys)
    for start in range(0, len(query_blocks), rows_per_tile):
        blocks = query_blocks[start : start + rows_per_tile]
        first, stop = int(blocks[0]), start + len(blocks)
        in_block = to_device(device, np.eye(int(blocks[-1]) - first + 1, dtype=np.float32)[blocks - first])
        index = torch.arange(start, stop, device=device)
        visible_keys = slice(0, stop + keys - len(query_blocks))
        weights = (record.masked_logits(index, visible_keys) - record.lse[:, index, None]).exp_()
        pooled = in_block.mT @ weights
        add_by_cell(sums[:, first : first + pooled.shape[1]], pooled, key_blocks[: pooled.shape[-1]])
    return sums
