"""Far mass: attention weight outside a streaming window, lost by a head that sees only the first and last tokens."""

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord, Geometry
from headscope.measures.binned_means import BinnedRowMeans
from headscope.measures.row_sampling import IntArray, count_visible_keys, items_per_tile, query_range, to_device
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
    (heads, _, dim), (groups, keys, _) = record.q.shape, record.k.shape
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
    q = record.q[:, row_index].float().view(groups, -1, len(rows), dim)
    logits = record.soft_cap(torch.einsum("ghrd,grkd->ghrk", q, record.k[:, index].float()) * record.scaling)
    weight = (logits.reshape(heads, len(rows), -1) - record.lse[:, row_index, None]).exp()
    seen = weight.masked_fill_(~to_device(weight.device, inside), 0).sum(-1)
    if record.sink_weight is not None:
        seen = seen + record.sink_weight[:, row_index]
    return (1 - seen).clamp(0, 1)


class FarMass(BinnedRowMeans):
    """Means of `far_mass` by visible keys."""

    name = "far_mass"
    statistic_names = ("far_mass",)

    def __init__(self, geometry: Geometry, length: int, n_rows: int | None, seed: int, window: StreamingWindow):
        super().__init__(geometry, length, n_rows, seed)
        self.window = window

    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor:
        return far_mass(record, rows, self.window)[None]
