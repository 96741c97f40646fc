"""Means over rows that see about as many keys: what every measure of rows shares."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.bins import visible_bin_edges
from headscope.measures.row_sampling import IntArray, count_visible_keys, log_spaced_rows, query_range, rows_in_chunk


class BinnedRowMeans(ABC):
    """Accumulates `statistics` of rows into bins of visible keys, per layer and head, in float64.

    `rows` is None for every row, else how many log-spaced rows to take; `seed` jitters them.
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
        """Statistics of query rows, by index of the queries, [len(statistics), H, rows]; None for a layer without."""

    def update(self, record: AttentionRecord) -> None:
        """Take what a layer computed for a document, or for the next chunk of its queries."""
        rows = rows_in_chunk(self.selected_rows, record)
        found = self.row_values(record, rows) if len(rows) else None
        if found is None:
            return
        visible = count_visible_keys(record, rows + query_range(record).start)
        bins = torch.from_numpy(np.searchsorted(self.edges, visible))
        self.counts[record.layer].index_add_(0, bins, torch.ones_like(bins))
        self.sums[:, :, record.layer].index_add_(-1, bins, found.double().cpu())

    def merge(self, other: "BinnedRowMeans") -> None:
        """Add what another accumulator of the same shape has seen."""
        self.counts += other.counts
        self.sums += other.sums

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the table without model, length and doc; bins that no row fell into are left out."""
        layer, bin_ = self.counts.nonzero(as_tuple=True)
        heads = self.geometry.heads
        rows = self.counts[layer, bin_]
        means = self.sums[:, :, layer, bin_] / rows
        head = torch.arange(heads).repeat(len(layer))
        columns = {
            "layer": torch.tensor(self.geometry.layer_numbers)[layer].repeat_interleave(heads),
            "head": head,
            "kv_group": head // self.geometry.heads_per_group,
            "visible": torch.from_numpy(self.edges)[bin_].repeat_interleave(heads),
            "rows": rows.repeat_interleave(heads),
            **{name: mean.T.reshape(-1) for name, mean in zip(self.statistic_names, means, strict=True)},
        }
        return {name: column.numpy() for name, column in columns.items()}
