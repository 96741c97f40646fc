"""Far mass: attention weight outside a streaming window, lost by a head that sees only the first and last tokens."""

from collections.abc import Mapping
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    items_per_tile,
    query_range,
    rows_in_chunk,
    select_last_octave,
    sums_beside,
    to_device,
)
from headscope.streaming import StreamingWindow

LOGITS_PER_TILE = 2**20
"""Logits in memory at once on a CPU, or those of one row: larger tiles leave its cache."""


def far_mass(record: AttentionRecord, rows: IntArray, window: StreamingWindow) -> Tensor:
    """Weight of query rows on visible keys outside the window, [H, rows], float32, 0..1.

    `rows` are indices of the record's queries, ascending. The sum is over these keys themselves: it is exactly 0 for a
    row without one. Cost is O(rows x keys); memory does not grow with the number of rows.
    """
    per_row = len(record.q) * record.k.shape[1]
    size = items_per_tile(record.q.device, max(1, LOGITS_PER_TILE // per_row), per_row)
    tiles = [_tile_far_mass(record, rows[start : start + size], window) for start in range(0, len(rows), size)]
    return torch.cat(tiles, -1) if tiles else record.q.new_zeros(len(record.q), 0, dtype=torch.float32)


def _tile_far_mass(record: AttentionRecord, rows: IntArray, window: StreamingWindow) -> Tensor:
    positions = rows + query_range(record).start
    first_visible = positions - count_visible_keys(record, positions) + 1
    # The far keys of a row are consecutive; numbers in the document become indices of the record's keys.
    first = np.maximum(first_visible, window.sink) - record.first_key
    stop = positions - window.recent + 1 - record.first_key
    keys = slice(max(0, int(first.min())), int(stop.max()))
    if keys.start >= keys.stop:
        return record.q.new_zeros(len(record.q), len(rows), dtype=torch.float32)
    index, stop_index = to_device(record.q.device, np.stack((rows, stop)))
    weight = record.masked_logits(index, keys).sub_(record.lse[:, index, None]).exp_()
    last = slice(max(keys.start, int(stop.min())), keys.stop)  # keys that are near to some of the rows
    is_near = torch.arange(last.start, last.stop, device=weight.device) >= stop_index[:, None]
    weight[..., last.start - keys.start :].masked_fill_(is_near, 0)
    return weight.sum(-1).clamp_(max=1)


class StreamingScores:
    """Accumulates the scores that order KV groups for streaming, for one document.

    The scores are ln ESS_2, the weight on the last 32 keys and `far_mass`: unweighted means over `n_rows` query rows,
    drawn evenly from the last octave of visible keys of each layer, or over all of these if `n_rows` is None.
    """

    statistic_names = ("log_ess2", "local_mass", "far_mass")

    def __init__(self, geometry: Geometry, length: int, n_rows: int | None, seed: int, window: StreamingWindow):
        self.geometry, self.window = geometry, window
        self._select = cache(partial(select_last_octave, length, n_rows, seed))
        self._select_all = cache(partial(select_last_octave, length, None, 0))
        self._counts = torch.zeros(geometry.layers, dtype=torch.int64)
        self._populations = self._counts.clone()
        self._sums = torch.zeros(2, 3, geometry.heads, geometry.layers, dtype=torch.float64)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        limits = record.window, record.chunk_size
        self._populations[record.layer] = len(self._select_all(*limits))
        rows = rows_in_chunk(self._select(*limits), record)
        if not len(rows):
            return
        of_rows = dict(zip(ROW_STATISTICS, row_statistics(record, rows), strict=True))
        of_rows["far_mass"] = far_mass(record, rows, self.window)
        values = torch.stack([of_rows[name] for name in self.statistic_names]).double()
        self._counts[record.layer] += len(rows)
        self._sums = sums_beside(self._sums, values)
        sums = torch.stack([values.sum(-1), values.square().sum(-1)])
        self._sums[:, :, : values.shape[1], record.layer] += sums.to(self._sums.device)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group and the mean of each statistic, with its standard error `<statistic>_se`.

        The error is that of a simple random sample of so many rows, 0 if all rows were used.
        """
        geometry, count = self.geometry, self._counts.double()
        layer, head = torch.meshgrid(torch.arange(geometry.layers), torch.arange(geometry.heads), indexing="ij")
        exists = head < torch.tensor(geometry.layer_heads)[layer]
        mean, mean_square = self._sums.cpu() / count
        variance = (mean_square - mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
        error = (variance * (1 - count / self._populations).clamp(min=0)).sqrt()
        columns = {
            "layer": torch.tensor(geometry.layer_numbers)[layer],
            "head": head,
            "kv_group": geometry.kv_group(layer, head),
            **{name: of_heads.T for name, of_heads in zip(self.statistic_names, mean, strict=True)},
            **{f"{name}_se": of_heads.T for name, of_heads in zip(self.statistic_names, error, strict=True)},
        }
        return {name: column[exists].numpy() for name, column in columns.items()}
