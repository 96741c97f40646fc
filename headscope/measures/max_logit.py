"""Largest attention logit of every head over all causal pairs of a text, with the pair: what bounds FP8 and QK-clip.

The row that has it comes from the sums of every row; its logits are then computed again, to find the key.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from headscope.attention.record import AttentionRecord, Geometry
from headscope.measures.row_sampling import IntArray, count_visible_keys, query_range, to_device, to_numpy


def max_logits(record: AttentionRecord) -> tuple[npt.NDArray[np.float32], IntArray, IntArray]:
    """Largest scaled logit of each head after the soft cap, and its query and key position: three arrays [H].

    Learned sinks are no keys and do not count. The record must have `row_sums`.
    """
    assert record.row_sums is not None
    groups, keys, dim = record.k.shape
    row = record.row_sums.max_logit.argmax(-1)
    queries = record.q.gather(1, row[:, None, None].expand(-1, 1, dim)).float().view(groups, -1, dim)
    logits = record.soft_cap(queries @ record.k.float().mT * record.scaling).view(len(row), keys)
    query = to_numpy(row) + query_range(record).start
    position = np.arange(record.first_key, record.first_key + keys)
    distance = query[:, None] - position
    is_hidden = (distance < 0) | (distance >= count_visible_keys(record, query)[:, None])
    largest, key = logits.masked_fill_(to_device(row.device, is_hidden), -torch.inf).max(-1)
    return largest.cpu().numpy(), query, position[to_numpy(key)]


class MaxLogit:
    """The `max_logit` table of one text: `max_logits` over all its chunks of queries."""

    name = "max_logit"

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        shape = (geometry.layers, geometry.heads)
        self.largest = np.full(shape, -np.inf, np.float32)
        self.pairs = np.zeros((2, *shape), np.int64)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        largest, query, key = max_logits(record)
        self._replace_smaller((record.layer, slice(len(largest))), largest, np.stack((query, key)))

    def merge(self, other: "MaxLogit") -> None:
        """Add another accumulator of the same geometry; of equal logits, the first counts."""
        self._replace_smaller((slice(None), slice(None)), other.largest, other.pairs)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the table without model, length and doc."""
        layer, head = np.nonzero(np.isfinite(self.largest))
        query, key = self.pairs[:, layer, head]
        return {
            "layer": np.array(self.geometry.layer_numbers)[layer],
            "head": head,
            "kv_group": self.geometry.kv_group(layer, head),
            "max_logit": self.largest[layer, head],
            "query": query,
            "key": key,
        }

    def _replace_smaller(
        self, at: tuple[int | slice, slice], largest: npt.NDArray[np.float32], pairs: IntArray
    ) -> None:
        is_larger = largest > self.largest[at]
        self.largest[at] = np.where(is_larger, largest, self.largest[at])
        self.pairs[:, *at] = np.where(is_larger, pairs, self.pairs[:, *at])
