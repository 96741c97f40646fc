"""What a head reads: the keys that get most of the weight of chosen query rows, and of those far back the one.

The weights are exp(logit - lse) of the very pass, with the log-sum-exp that the fused kernel returned. Rows are visited
in tiles, so that memory is O(L) however many rows and heads there are; of a row `most` keys are kept.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import rows_in_chunk

MIN_FAR_DISTANCE = 32
"""Keys closer than this, and the first of all, are not far: nearly every head reads them."""
LOGITS_PER_TILE = 2**22
"""Logits that are held at once."""


def stratified_rows(length: int, count: int, seed: int) -> Tensor:
    """`count` distinct rows of 0..length-1, one drawn from each of `count` equal parts; every row where that is fewer.

    The draw knows neither heads nor models, so that rows compare. Sorted, int64.
    """
    if count >= length:
        return torch.arange(length)
    edges = torch.arange(count + 1) * length // count
    share = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows: Tensor = edges[:-1] + (share * edges.diff()).long()
    return rows


@dataclass(frozen=True, eq=False)
class TopKeys:
    """Of H heads and n rows: the `keys` [H, n, k] of most weight, largest first, ties to the later, with their
    `weights`, NaN where a row sees fewer; and the `far` key of most weight [H, n] with `far_weights`, NaN without any.
    """

    keys: Tensor
    weights: Tensor
    far_keys: Tensor
    far_weights: Tensor


def find_top_keys(record: AttentionRecord, rows: Tensor, max_keys: int) -> TopKeys:
    """The top keys of query rows [n], by index of the queries, sorted ascending."""
    size = max(1, LOGITS_PER_TILE // (record.q.shape[0] * record.k.shape[1]))
    tiles = [_tile_top_keys(record, some, max_keys) for some in torch.split(rows, size)]
    return TopKeys(*(torch.cat(parts, 1) for parts in zip(*tiles, strict=True)))


def _tile_top_keys(record: AttentionRecord, rows: Tensor, max_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups, _, dim = record.k.shape
    visible, own = record.visible_counts[rows], record.query_key_index[rows]
    first, last = int((own - visible).min()) + 1, int(own[-1])
    # Later keys come first, so that of equal ones the later is met first.
    keys = torch.arange(last, first - 1, -1, device=rows.device)
    q = record.q[:, rows].float().reshape(groups, -1, dim)
    logits = record.soft_cap((q @ record.k[:, keys].float().mT).mul_(record.scaling)).view(-1, len(rows), len(keys))
    distance = own[:, None] - keys
    logits.masked_fill_((distance < 0) | (distance >= visible[:, None]), -torch.inf)
    lse = record.lse[:, rows, None]
    found, at = _top_k_stable(logits, max_keys)
    weights = (found - lse).exp().clamp(max=1).masked_fill(found == -torch.inf, torch.nan)
    best, far = logits.masked_fill_((distance < MIN_FAR_DISTANCE) | (keys == 0), -torch.inf).max(-1)
    far_weights = (best - lse[..., 0]).exp().clamp(max=1).masked_fill(best == -torch.inf, torch.nan)
    missing = max_keys - found.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, missing), value=torch.nan)
    return torch.nn.functional.pad(keys[at], (0, missing)), padded, keys[far], far_weights


def _top_k_stable(logits: Tensor, max_keys: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row and where they are, largest first, of equal ones the first: [H, n, k]."""
    values, at = logits.topk(min(max_keys, logits.shape[-1]))
    least = values[..., -1:]
    # `topk` takes any of equal values: where more of them reach the last place, sort that row.
    tied = ((logits >= least).sum(-1) > values.shape[-1]) & (least[..., 0] > -torch.inf)
    if tied.any():
        sorted_values, order = logits[tied].sort(dim=-1, descending=True, stable=True)
        values[tied], at[tied] = sorted_values[:, : values.shape[-1]], order[:, : values.shape[-1]]
    at, by_place = at.sort(dim=-1)
    values, by_value = values.gather(-1, by_place).sort(dim=-1, descending=True, stable=True)
    return values, at.gather(-1, by_value)


class TopKeysAccumulator:
    """The top keys of the same `rows` in every layer and head of one document."""

    def __init__(self, geometry: Geometry, rows: Tensor, max_keys: int):
        self.geometry, self.rows, self.max_keys = geometry, rows, max_keys
        self._chunks_by_layer: dict[int, list[TopKeys]] = defaultdict(list)

    def update(self, record: AttentionRecord) -> None:
        """Take what a layer computed for a document, or for the next chunk of its queries."""
        rows = rows_in_chunk(self.rows.numpy(), record)
        if len(rows):
            top = find_top_keys(record, torch.from_numpy(rows).to(record.q.device), self.max_keys)
            self._chunks_by_layer[record.layer].append(TopKeys(*(part.cpu() for part in vars(top).values())))

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, query, rank, key and weight, in the order of the first ones."""
        weights, keys = self._stack_layers("weights"), self._stack_layers("keys")
        seen = ~weights.isnan()
        *places, rank = seen.nonzero(as_tuple=True)
        return {
            **self._row_columns(*places),
            "rank": rank.numpy(),
            "key": keys[seen].numpy(),
            "weight": weights[seen].numpy(),
        }

    def compute_far_keys(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, query, key and weight of the far key; rows that see none are left out."""
        weights, keys = self._stack_layers("far_weights"), self._stack_layers("far_keys")
        seen = ~weights.isnan()
        places = seen.nonzero(as_tuple=True)
        return {**self._row_columns(*places), "key": keys[seen].numpy(), "weight": weights[seen].numpy()}

    def _stack_layers(self, field_name: str) -> Tensor:
        """One part of what was found, [layers, H, rows, ..]."""
        layers = [self._chunks_by_layer[layer] for layer in sorted(self._chunks_by_layer)]
        return torch.stack([torch.cat([getattr(chunk, field_name) for chunk in chunks], 1) for chunks in layers])

    def _row_columns(self, layer: Tensor, head: Tensor, row: Tensor) -> dict[str, np.ndarray]:
        return {
            "layer": np.array(self.geometry.layer_numbers)[layer.numpy()],
            "head": head.numpy(),
            "kv_group": head.numpy() // self.geometry.heads_per_group,
            "query": self.rows[row].numpy(),
        }
