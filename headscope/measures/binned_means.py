"""Means over log-spaced bins: of row statistics by visible keys, and of the next-token loss by position."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache, partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.base.bins import position_bin_edges, visible_bin_edges
from headscope.measures.row_sampling import (
    IntArray,
    add_by_cell,
    items_per_tile,
    log_spaced_rows,
    query_range,
    rows_in_chunk,
    select_rows,
    sums_beside,
)


class BinnedRowMeans(ABC):
    """Accumulates row statistics into bins of visible keys, per layer and head, in float64.

    `n_rows` is the number of rows to sample, None for every row; `seed` jitters the sample (`select_rows`). Every bin
    has two cells, for the rows that see key 0 and for the others. Its mean weights them by the rows of the document in
    them, so that a sample and all rows estimate the same mean. Statistics of key 0 are means over the first cell.
    """

    name: ClassVar[str]
    statistic_names: ClassVar[tuple[str, ...]]
    sink_statistics: ClassVar[frozenset[str]] = frozenset()
    """The statistics of key 0. If there are any, the table counts the rows that see it."""

    def __init__(self, geometry: Geometry, length: int, n_rows: int | None, seed: int):
        self.geometry = geometry
        self.edges = visible_bin_edges(length)
        log_spaced = None if n_rows is None else log_spaced_rows(length, n_rows, seed).numpy()
        self.select_rows = cache(partial(select_rows, length, log_spaced, seed))
        cells = (geometry.layers, 2 * len(self.edges))
        self.counts, self.populations = torch.zeros(2, *cells, dtype=torch.int64)
        self.sums = torch.zeros(len(self.statistic_names), geometry.heads, *cells, dtype=torch.float64)

    @abstractmethod
    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor | None:
        """Statistics of query rows, [len(statistic_names), H, rows]; None for a layer without them.

        `rows` are indices of the record's queries.
        """

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        selection, queries = self.select_rows(record.window, record.chunk_size), query_range(record)
        self.populations[record.layer] += torch.from_numpy(selection.count_cells(queries))
        rows = rows_in_chunk(selection.rows, record)
        values = self.row_values(record, rows) if len(rows) else None
        if values is None:
            return
        self.counts[record.layer] += torch.from_numpy(selection.count_cells(rows + queries.start))
        self.sums = sums_beside(self.sums, values)
        of_layer = self.sums[:, : values.shape[1], record.layer]
        add_by_cell(of_layer, values.double(), selection.cell_of_row[rows + queries.start])

    def merge(self, other: "BinnedRowMeans") -> None:
        """Add the sums of another accumulator of the same shape."""
        self.counts += other.counts
        self.populations += other.populations
        self.sums = self.sums + other.sums.to(self.sums.device)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the table without model, length and doc. Empty bins are left out."""
        counts, populations, sums = (
            cells.unflatten(-1, (-1, 2)) for cells in (self.counts, self.populations, self.sums.cpu())
        )
        layer, bin_ = counts.any(-1).nonzero(as_tuple=True)
        counts, populations, sums = counts[layer, bin_], populations[layer, bin_], sums[:, :, layer, bin_]
        populations = populations * (counts > 0)
        heads = self.geometry.heads
        head, head_layer = torch.arange(heads).repeat(len(layer)), layer.repeat_interleave(heads)
        exists = head < torch.tensor(self.geometry.layer_heads)[head_layer]
        of_bins = {"rows": counts.sum(-1), "population": populations.sum(-1)}
        if self.sink_statistics:
            of_bins |= {"sink_rows": counts[:, 0], "sink_population": populations[:, 0]}
        cell_means = sums / counts.clamp(min=1)
        means = (cell_means * (populations / populations.sum(-1, keepdim=True))).sum(-1)
        columns = {
            "layer": torch.tensor(self.geometry.layer_numbers)[head_layer],
            "head": head,
            "kv_group": self.geometry.kv_group(head_layer, head),
            "visible": torch.from_numpy(self.edges)[bin_].repeat_interleave(heads),
            **{name: values.repeat_interleave(heads) for name, values in of_bins.items()},
        }
        for name, mean, of_cells in zip(self.statistic_names, means, cell_means, strict=True):
            columns[name] = (of_cells[..., 0] if name in self.sink_statistics else mean).T.reshape(-1)
        return {name: column[exists].numpy() for name, column in columns.items()}


ROWS_PER_LOSS_TILE = 32
"""Rows of logits whose loss is computed at once: page faults of larger temporaries cost more than the arithmetic."""


class LossByPosition:
    """Accumulates the loss of the predicted tokens 1..length-1 into log-spaced bins of position, in float64.

    Updates take chunks of logits, so that memory stays O(chunk x vocabulary).
    """

    name = "nll"

    def __init__(self, length: int):
        self.edges = position_bin_edges(length)
        self.sums = torch.zeros(len(self.edges), dtype=torch.float64)
        self.counts = np.zeros(len(self.edges), np.int64)

    def update(self, logits: Tensor, targets: Tensor, first_position: int) -> None:
        """Add logits [n, vocabulary] and their target tokens [n], which start at position `first_position`."""
        size = items_per_tile(logits.device, ROWS_PER_LOSS_TILE, logits.shape[1])
        tiles = zip(torch.split(logits, size), torch.split(targets, size), strict=True)
        losses = torch.cat(
            [nn.functional.cross_entropy(tile.float(), of_tile, reduction="none") for tile, of_tile in tiles]
        )
        bins = np.searchsorted(self.edges, np.arange(first_position, first_position + len(targets)))
        self.sums = sums_beside(self.sums, losses)
        add_by_cell(self.sums, losses.double(), bins)
        self.counts += np.bincount(bins, minlength=len(self.edges))

    def merge(self, other: "LossByPosition") -> None:
        """Add the sums of another accumulator of the same length."""
        self.sums = self.sums + other.sums.to(self.sums.device)
        self.counts += other.counts

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `nll` table without model, length and doc: mean nats per token of each nonempty bin."""
        has_tokens = self.counts > 0
        return {
            "position": self.edges[has_tokens],
            "nll": self.sums.cpu().numpy()[has_tokens] / self.counts[has_tokens],
            "tokens": self.counts[has_tokens],
        }
