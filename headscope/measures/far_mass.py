"""Far mass: attention weight outside a streaming window, lost by a head that sees only the first and last tokens."""

from collections.abc import Mapping
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord, Geometry
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

ROW_TILE = 16


def far_mass(record: AttentionRecord, rows: IntArray, window: StreamingWindow) -> Tensor:
    """Weight of query rows on visible keys outside the window, [H, rows], float32, 0..1.

    `rows` are indices of the record's queries. Cost and memory are O(rows x (sink + recent)): the weight on the keys
    inside the window, and that of a learned sink, are subtracted from 1.
    """
    (heads, _, dim), (groups, keys, _) = record.q.shape, record.k.shape
    width = min(window.sink + window.recent, record.first_key + keys)
    size = items_per_tile(record.q.device, ROW_TILE, groups * width * dim)
    tiles = [_tile_far_mass(record, rows[start : start + size], window) for start in range(0, len(rows), size)]
    return torch.cat(tiles, -1) if tiles else record.q.new_zeros(heads, 0, dtype=torch.float32)


def _tile_far_mass(record: AttentionRecord, rows: IntArray, window: StreamingWindow) -> Tensor:
    keys = record.k.shape[1]
    own = rows + query_range(record).start  # positions in the document, as those of all keys below
    first_keys = np.arange(min(window.sink, record.first_key + keys))
    sinks = np.broadcast_to(first_keys, (len(rows), len(first_keys)))
    recent = own[:, None] - np.arange(min(window.recent, record.first_key + keys))
    columns = np.concatenate((sinks, recent), 1)
    first_visible = own - count_visible_keys(record, own) + 1
    inside = (columns >= np.maximum(first_visible, record.first_key)[:, None]) & (columns <= own[:, None])
    inside[:, sinks.shape[1] :] &= recent >= window.sink  # counted among the first keys
    index = to_device(record.k.device, np.clip(columns - record.first_key, 0, keys - 1))
    row_index = to_device(record.q.device, rows)
    weight = (record.logits_at(row_index, index) - record.lse[:, row_index, None]).exp()
    seen = weight.masked_fill_(to_device(weight.device, ~inside), 0).sum(-1)
    if record.sink_weight is not None:
        seen = seen + record.sink_weight[:, row_index]
    return (1 - seen).clamp(0, 1)


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
