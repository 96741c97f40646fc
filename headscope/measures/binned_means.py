"""Means over log-spaced bins: of row statistics by visible keys, and of the next-token loss by position."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from headscope.attention.record import AttentionRecord, Geometry
from headscope.bins import position_bin_edges, visible_bin_edges
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    items_per_tile,
    log_spaced_rows,
    query_range,
    rows_in_chunk,
)


class BinnedRowMeans(ABC):
    """Accumulates row statistics into bins of visible keys, per layer and head, in float64.

    `n_rows` is the number of log-spaced rows to sample, None for every row; `seed` jitters the sample.
    """

    name: ClassVar[str]
    statistic_names: ClassVar[tuple[str, ...]]

    def __init__(self, geometry: Geometry, length: int, n_rows: int | None, seed: int):
        self.geometry = geometry
        self.edges = visible_bin_edges(length)
        self.selected_rows = np.arange(length) if n_rows is None else log_spaced_rows(length, n_rows, seed).numpy()
        bins = (geometry.layers, len(self.edges))
        self.counts = torch.zeros(bins, dtype=torch.int64)
        self.sums = torch.zeros(len(self.statistic_names), geometry.heads, *bins, dtype=torch.float64)

    @abstractmethod
    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor | None:
        """Statistics of query rows, [len(statistic_names), H, rows]; None for a layer without them.

        `rows` are indices of the record's queries.
        """

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        rows = rows_in_chunk(self.selected_rows, record)
        values = self.row_values(record, rows) if len(rows) else None
        if values is None:
            return
        visible = count_visible_keys(record, rows + query_range(record).start)
        bins = torch.from_numpy(np.searchsorted(self.edges, visible))
        self.counts[record.layer].index_add_(0, bins, torch.ones_like(bins))
        self.sums[:, : values.shape[1], record.layer].index_add_(-1, bins, values.double().cpu())

    def merge(self, other: "BinnedRowMeans") -> None:
        """Add the sums of another accumulator of the same shape."""
        self.counts += other.counts
        self.sums += other.sums

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the table without model, length and doc. Empty bins are left out."""
        layer, bin_ = self.counts.nonzero(as_tuple=True)
        heads = self.geometry.heads
        rows = self.counts[layer, bin_]
        means = self.sums[:, :, layer, bin_] / rows
        head, head_layer = torch.arange(heads).repeat(len(layer)), layer.repeat_interleave(heads)
        exists = head < torch.tensor(self.geometry.layer_heads)[head_layer]
        columns = {
            "layer": torch.tensor(self.geometry.layer_numbers)[head_layer],
            "head": head,
            "kv_group": self.geometry.kv_group(head_layer, head),
            "visible": torch.from_numpy(self.edges)[bin_].repeat_interleave(heads),
            "rows": rows.repeat_interleave(heads),
            **{name: mean.T.reshape(-1) for name, mean in zip(self.statistic_names, means, strict=True)},
        }
        return {name: column[exists].numpy() for name, column in columns.items()}


ROWS_PER_LOSS_TILE = 32
"""Rows of logits whose loss is computed at once: page faults of larger temporaries cost more than the arithmetic."""


class LossByPosition:
    """Accumulates the loss of the predicted tokens 1..length-1 into log-spaced bins of position, in float64.

    Updates take chunks of logits, so that memory stays O(chunk x vocabulary).
    """

    name = "nll"

    def __init__(self, length: int):
        self.edges = torch.from_numpy(position_bin_edges(length))
        self.sums = torch.zeros(len(self.edges), dtype=torch.float64)
        self.counts = torch.zeros(len(self.edges), dtype=torch.int64)

    def update(self, logits: Tensor, targets: Tensor, first_position: int) -> None:
        """Add logits [n, vocabulary] and their target tokens [n], which start at position `first_position`."""
        size = items_per_tile(logits.device, ROWS_PER_LOSS_TILE, logits.shape[1])
        tiles = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
        losses = torch.cat(
            [nn.functional.cross_entropy(tile.float(), of_tile, reduction="none") for tile, of_tile in tiles]
        )
        bins = torch.bucketize(torch.arange(first_position, first_position + len(targets)), self.edges)
        self.sums.index_add_(0, bins, losses.double().cpu())
        self.counts += torch.bincount(bins, minlength=len(self.edges))

    def merge(self, other: "LossByPosition") -> None:
        """Add the sums of another accumulator of the same length."""
        self.sums += other.sums
        self.counts += other.counts

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `nll` table without model, length and doc: mean nats per token of each nonempty bin."""
        has_tokens = self.counts > 0
        columns = {
            "position": self.edges[has_tokens],
            "nll": self.sums[has_tokens] / self.counts[has_tokens],
            "tokens": self.counts[has_tokens],
        }
        return {name: column.numpy() for name, column in columns.items()}
