"""Top attended keys: the keys with the largest weights of sampled query rows, and the top key at a far distance.

Weights are exp(logit - lse) of the same forward pass, with the log-sum-exp that the fused kernel returned. Rows are
visited in tiles, so memory is O(L) for any number of rows and heads; per row only the top keys are kept.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry, stack_layers
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    items_per_tile,
    query_range,
    rows_in_chunk,
    to_device,
    to_numpy,
)

MIN_FAR_DISTANCE = 32
"""Keys closer than this, and the first key, are not far: nearly every head attends to them."""
LOGITS_PER_TILE = 2**22
"""Logits in memory at once on a CPU."""


def stratified_rows(length: int, count: int, seed: int) -> Tensor:
    """`count` distinct rows of 0..length-1, one drawn from each of `count` equal parts; every row if there are fewer.

    The draw does not depend on heads or models, so all have the same rows. Sorted, int64.
    """
    if count >= length:
        return torch.arange(length)
    edges = torch.arange(count + 1) * length // count
    offsets = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows: Tensor = edges[:-1] + (offsets * edges.diff()).long()
    return rows


@dataclass(frozen=True, eq=False)
class TopKeys:
    """Top keys of H heads and n rows.

    `keys` [H, n, k] have the largest weights, in descending order; of equal weights the later key comes first. Their
    `weights` are NaN if a row sees fewer than k keys. `far_keys` [H, n] have the largest weight among far keys;
    `far_weights` are NaN if a row sees no far key.
    """

    keys: Tensor
    weights: Tensor
    far_keys: Tensor
    far_weights: Tensor


def find_top_keys(record: AttentionRecord, rows: Tensor | IntArray, max_keys: int) -> TopKeys:
    """Top keys of query rows [n], given as indices of the record's queries in ascending order."""
    per_row, rows = record.q.shape[0] * record.k.shape[1], to_numpy(rows)
    size = items_per_tile(record.q.device, max(1, LOGITS_PER_TILE // per_row), per_row)
    tiles = [_tile_top_keys(record, rows[n : n + size], max_keys) for n in range(0, len(rows), size)]
    return TopKeys(*(torch.cat(parts, 1) for parts in zip(*tiles, strict=True)))


def _tile_top_keys(
    record: AttentionRecord, row_indices: IntArray, max_keys: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own_keys = row_indices + record.k.shape[1] - record.q.shape[1]
    visible = count_visible_keys(record, row_indices + query_range(record).start)
    first, last = int((own_keys - visible).min()) + 1, int(own_keys[-1])
    rows, own_key_index = to_device(record.q.device, np.stack((row_indices, own_keys)))
    # Later keys come first, so that ties go to the later key.
    keys = torch.arange(last, first - 1, -1, device=rows.device)
    logits, distance = record.masked_logits(rows, keys), own_key_index[:, None] - keys
    lse = record.lse[:, rows, None]
    top_logits, indices = _top_k_stable(logits, max_keys)
    weights = (top_logits - lse).exp().clamp(max=1).masked_fill(top_logits == -torch.inf, torch.nan)
    far_logits, far = logits.masked_fill_((distance < MIN_FAR_DISTANCE) | (keys == 0), -torch.inf).max(-1)
    far_weights = (far_logits - lse[..., 0]).exp().clamp(max=1).masked_fill(far_logits == -torch.inf, torch.nan)
    missing = max_keys - top_logits.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, missing), value=torch.nan)
    return torch.nn.functional.pad(keys[indices], (0, missing)), padded, keys[far], far_weights


def _top_k_stable(logits: Tensor, max_keys: int) -> tuple[Tensor, Tensor]:
    """Largest values of each row and their indices, in descending order, ties by index: both [H, n, k]."""
    values, indices = logits.topk(min(max_keys, logits.shape[-1]))
    if logits.device.type != "cpu":
        indices = _top_indices(logits, values)
        values, by_value = logits.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
        return values, indices.gather(-1, by_value)
    smallest = values[..., -1:]
    # `topk` returns any of several equal values: if more values than k reach the smallest, sort that row.
    tied = ((logits >= smallest).sum(-1) > values.shape[-1]) & (smallest[..., 0] > -torch.inf)
    if tied.any():
        sorted_values, order = logits[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], indices[tied] = sorted_values[:, : values.shape[-1]], order[:, : values.shape[-1]]
    indices, by_index = indices.sort(dim=-1)
    values, by_value = values.gather(-1, by_index).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, by_value)


def _top_indices(logits: Tensor, top_values: Tensor) -> Tensor:
    """Indices of the top values of each row, ascending; of equal values, the first. Slower, but waits for no number."""
    smallest = top_values[..., -1:]
    is_larger, is_tied = logits > smallest, logits == smallest
    n_tied = top_values.shape[-1] - is_larger.sum(-1, keepdim=True)
    is_top = is_larger | (is_tied & (is_tied.cumsum(-1, dtype=torch.int32) <= n_tied))
    from_end = torch.arange(logits.shape[-1], 0, -1, dtype=torch.int32, device=logits.device)
    return torch.where(is_top, from_end, 0).topk(top_values.shape[-1]).indices


class TopKeysAccumulator:
    """Accumulates the top keys of the same rows in every layer and head of one document."""

    def __init__(self, geometry: Geometry, rows: Tensor, max_keys: int):
        self.geometry, self.rows, self.max_keys = geometry, rows.numpy(), max_keys
        self._chunks_by_layer: dict[int, list[TopKeys]] = defaultdict(list)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        rows = rows_in_chunk(self.rows, record)
        if len(rows):
            self._chunks_by_layer[record.layer].append(find_top_keys(record, rows, self.max_keys))

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, query, rank, key and weight, sorted by the first five."""
        weights, keys = self._stack_layers("weights"), self._stack_layers("keys")
        is_visible = ~weights.isnan()
        layer, head, row, rank = is_visible.nonzero(as_tuple=True)
        return {
            **self._row_columns(layer, head, row),
            "rank": rank.numpy(),
            "key": keys[is_visible].numpy(),
            "weight": weights[is_visible].numpy(),
        }

    def compute_far_keys(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, query, key and weight of the far key. Rows without one are left out."""
        weights, keys = self._stack_layers("far_weights"), self._stack_layers("far_keys")
        is_visible = ~weights.isnan()
        columns = self._row_columns(*is_visible.nonzero(as_tuple=True))
        return {**columns, "key": keys[is_visible].numpy(), "weight": weights[is_visible].numpy()}

    def _stack_layers(self, field_name: str) -> Tensor:
        """One field of the top keys of all layers, [layers, H, rows, ..]."""
        layers = [self._chunks_by_layer[layer] for layer in sorted(self._chunks_by_layer)]
        fields = [torch.cat([getattr(chunk, field_name) for chunk in chunks], 1) for chunks in layers]
        # A head that a layer does not have gets the weight NaN, like a key that a row does not see.
        fill = torch.nan if fields[0].is_floating_point() else 0
        return stack_layers([field.movedim(0, -1) for field in fields], fill).movedim(-1, 1).cpu()

    def _row_columns(self, layer: Tensor, head: Tensor, row: Tensor) -> dict[str, np.ndarray]:
        return {
            "layer": np.array(self.geometry.layer_numbers)[layer.numpy()],
            "head": head.numpy(),
            "kv_group": self.geometry.kv_group(layer, head).numpy(),
            "query": self.rows[row.numpy()],
        }
