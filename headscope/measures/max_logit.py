"""Largest attention logit of every head over all causal pairs of a text, with the pair: what bounds FP8 and QK-clip.

The row that has it comes from the sums of every row; its logits are then computed again, to find the key.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import query_range, sums_beside


def max_logits(record: AttentionRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Largest scaled logit of each head after the soft cap, and its query and key position: three tensors [H].

    Learned sinks are no keys and do not count. The record must have `row_sums`.
    """
    assert record.row_sums is not None
    row = record.row_sums.max_logit.argmax(-1)
    # All heads at the rows of all heads: row h is that of head h.
    logits = record.masked_logits(row, slice(0, record.k.shape[1])).diagonal(dim1=0, dim2=1).mT
    largest, key = logits.max(-1)
    return largest, row + query_range(record).start, key + record.first_key


class MaxLogit:
    """The `max_logit` table of one text: `max_logits` over all its chunks of queries."""

    name = "max_logit"

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        # Largest logit, query and key of every head, in float64, which holds all three exactly: one tensor, one copy.
        self.best = torch.zeros(3, geometry.layers, geometry.heads, dtype=torch.float64)
        self.best[0] = -torch.inf

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        best = torch.stack([part.double() for part in max_logits(record)])
        self.best = sums_beside(self.best, best)
        self._replace_smaller(self.best[:, record.layer, : best.shape[1]], best.to(self.best.device))

    def merge(self, other: "MaxLogit") -> None:
        """Add another accumulator of the same geometry; of equal logits, the first counts."""
        self._replace_smaller(self.best, other.best)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the table without model, length and doc."""
        best = self.best.cpu().numpy()
        layer, head = np.nonzero(np.isfinite(best[0]))
        largest, query, key = best[:, layer, head]
        return {
            "layer": np.array(self.geometry.layer_numbers)[layer],
            "head": head,
            "kv_group": self.geometry.kv_group(layer, head),
            "max_logit": largest.astype(np.float32),
            "query": query.astype(np.int64),
            "key": key.astype(np.int64),
        }

    @staticmethod
    def _replace_smaller(best: Tensor, other: Tensor) -> None:
        other = other.to(best.device)
        best[:] = torch.where(other[0] > best[0], other, best)
