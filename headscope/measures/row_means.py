"""Means over rows that see about as many keys: what every measure of rows shares."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.bins import visible_edges
from headscope.measures.row_sampling import Places, among, log_spaced, queries, visible_keys


class RowMeans(ABC):
    """Accumulates `statistics` of rows into bins of visible keys, per layer and head, in float64.

    `rows` is None for every row, else how many log-spaced rows to take; `seed` jitters them.
    """

    name: ClassVar[str]
    statistics: ClassVar[tuple[str, ...]]

    def __init__(self, geometry: Geometry, length: int, rows: int | None, seed: int):
        self.geometry = geometry
        self.edges = visible_edges(length)
        self.chosen = np.arange(length) if rows is None else log_spaced(length, rows, seed).numpy()
        bins = (geometry.layers, len(self.edges))
        self.counts = torch.zeros(bins, dtype=torch.int64)
        self.sums = torch.zeros(len(self.statistics), geometry.heads, *bins, dtype=torch.float64)

    @abstractmethod
    def of_rows(self, heard: AttentionRecord, rows: Places) -> Tensor | None:
        """Statistics of query rows, by index of the queries, [len(statistics), H, rows]; None for a layer without."""

    def update(self, heard: AttentionRecord) -> None:
        """Take what a layer computed for a document, or for the next chunk of its queries."""
        rows = among(self.chosen, heard)
        found = self.of_rows(heard, rows) if len(rows) else None
        if found is None:
            return
        visible = visible_keys(heard, rows + queries(heard).start)
        bins = torch.from_numpy(np.searchsorted(self.edges, visible))
        self.counts[heard.layer].index_add_(0, bins, torch.ones_like(bins))
        self.sums[:, :, heard.layer].index_add_(-1, bins, found.double().cpu())

    def merge(self, other: "RowMeans") -> None:
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
            "layer": torch.tensor(self.geometry.numbers)[layer].repeat_interleave(heads),
            "head": head,
            "kv_group": head // self.geometry.heads_per_group,
            "visible": torch.from_numpy(self.edges)[bin_].repeat_interleave(heads),
            "rows": rows.repeat_interleave(heads),
            **{name: mean.T.reshape(-1) for name, mean in zip(self.statistics, means, strict=True)},
        }
        return {name: column.numpy() for name, column in columns.items()}
