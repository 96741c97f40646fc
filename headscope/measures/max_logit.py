"""Largest attention logit of every head over all causal pairs of a text, with the pair: what bounds FP8 and QK-clip.

The row that has it comes from the sums of every row; its logits are then computed again, to find the key.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord, Geometry
from headscope.measures.row_sampling import count_visible_keys, query_range, to_device, to_numpy


def max_logits(record: AttentionRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Largest scaled logit of each head after the soft cap, and its query and key position: three tensors [H], on CPU.

    Learned sinks are no keys and do not count. The record must have `row_sums`.
    """
    assert record.row_sums is not None
    groups, keys, dim = record.k.shape
    row = record.row_sums.max_logit.argmax(-1)
    queries = record.q[torch.arange(len(row), device=row.device), row].float().view(groups, -1, dim)
    logits = record.soft_cap(queries @ record.k.float().mT * record.scaling).view(len(row), keys)
    query = to_numpy(row) + query_range(record).start
    first_visible = to_device(row.device, query + 1 - count_visible_keys(record, query))
    last_visible = to_device(row.device, query)
    position = torch.arange(record.first_key, record.first_key + keys, device=row.device)
    is_hidden = (position < first_visible[:, None]) | (position > last_visible[:, None])
    largest, key = logits.masked_fill_(is_hidden, -torch.inf).max(-1)
    return largest.cpu(), torch.from_numpy(query), key.cpu() + record.first_key


class MaxLogit:
    """The `max_logit` table of one text: `max_logits` over all its chunks of queries."""

    name = "max_logit"

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        shape = (geometry.layers, geometry.heads)
        self.largest = torch.full(shape, -torch.inf)
        self.pairs = torch.zeros(2, *shape, dtype=torch.int64)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        largest, query, key = max_logits(record)
        heads = len(largest)
        self._replace_smaller(record.layer, slice(heads), largest, torch.stack((query, key)))

    def merge(self, other: "MaxLogit") -> None:
        """Add another accumulator of the same geometry; of equal logits, the first counts."""
        self._replace_smaller(slice(None), slice(None), other.largest, other.pairs)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the table without model, length and doc."""
        layer, head = self.largest.isfinite().nonzero(as_tuple=True)
        query, key = self.pairs[:, layer, head]
        columns = {
            "layer": torch.tensor(self.geometry.layer_numbers)[layer],
            "head": head,
            "kv_group": self.geometry.kv_group(layer, head),
            "max_logit": self.largest[layer, head],
            "query": query,
            "key": key,
        }
        return {name: column.numpy() for name, column in columns.items()}

    def _replace_smaller(self, layers: int | slice, heads: slice, largest: Tensor, pairs: Tensor) -> None:
        is_larger = largest > self.largest[layers, heads]
        self.largest[layers, heads] = torch.where(is_larger, largest, self.largest[layers, heads])
        self.pairs[:, layers, heads] = torch.where(is_larger, pairs, self.pairs[:, layers, heads])
