"""Effective length and shape of attention rows, streamed: no L x L matrix, whatever the number of rows.

ln ESS_2 = 2 lse(s) - lse(2 s) = -ln sum_j alpha_ij^2 (paper, section on AdaScale; appendix, effective sequence length).
The log-sum-exp comes from the fused kernel that computed the output; rows are then visited in tiles that fit the cache.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.heard import Attention
from headscope.measures.rows import log_spaced
from headscope.runs.bins import visible_edges

LOCAL_KEYS = 32
STATISTICS = ("ess2", "log_ess2", "ess1", "max_weight", "sink_mass", "local_mass", "mean_distance")
ROW_TILE, KEY_TILE = 64, 512
NEVER = -1e30
"""Logit of a masked key: exp gives 0, and 0 x NEVER is still 0 where -inf would give NaN."""


def row_statistics(heard: Attention, rows: Tensor) -> Tensor:
    """Statistics of the given query rows, [len(STATISTICS), H, rows], float32, in the order of `STATISTICS`.

    Ranges: 1 <= ess2 <= ess1 <= visible keys; weights in [0, 1]; mean_distance in tokens, >= 0. `rows` index the
    queries, sorted ascending. Accumulated in log-space relative to the row's log-sum-exp, in float32.

    A learned sink takes its share of every row. `max_weight`, `sink_mass` (of key 0) and `local_mass` are the weights
    that are left to keys; effective lengths and distance are of what is left, as shares of it, so that a head which
    gives nearly all to its sink does not seem to attend to more keys than there are.
    """
    tiles = [_tile_statistics(heard, rows[start : start + ROW_TILE]) for start in range(0, len(rows), ROW_TILE)]
    return torch.cat(tiles, -1)


def _tile_statistics(heard: Attention, rows: Tensor) -> Tensor:
    """`row_statistics` of at most ROW_TILE rows: one sweep over their keys."""
    groups, _, dim = heard.k.shape
    own, visible = heard.query_index[rows], None if heard.sees_all else heard.visible[rows]
    first = 0 if visible is None else int(own[0] - visible[0]) + 1
    q = heard.q[:, rows].float().reshape(groups, -1, dim)
    minus_lse = -heard.lse[:, rows].float().reshape(groups, -1, 1)
    shape = (heard.q.shape[0], len(rows))
    largest = torch.full(shape, NEVER, device=q.device)
    squares, neg_entropy, sink, kept = (torch.zeros(shape, device=q.device) for _ in range(4))
    distance_and_local = torch.zeros(shape[1], shape[0], 2, device=q.device)
    for start in range(first, int(own[-1]) + 1, KEY_TILE):
        stop = min(start + KEY_TILE, int(own[-1]) + 1)
        keys = torch.arange(start, stop, device=q.device)
        scaled = heard.k[:, start:stop].float().transpose(1, 2) * heard.scaling
        log_weight = (
            torch.baddbmm(minus_lse, q, scaled) if heard.cap is None else heard.capped(torch.bmm(q, scaled)) + minus_lse
        ).view(*shape, -1)
        distance = own[:, None] - keys
        hidden = _hidden(distance, visible)
        if hidden is not None:
            log_weight.masked_fill_(hidden, NEVER)
        weight = log_weight.exp()
        largest = torch.maximum(largest, log_weight.amax(-1))
        squares += torch.linalg.vecdot(weight, weight)
        neg_entropy += torch.linalg.vecdot(weight, log_weight)
        if heard.sink is not None:
            kept += weight.sum(-1)
        # Distances, not key indices: far from the start a mean index minus the row's own would lose its digits.
        of_keys = torch.stack((distance.float(), (distance < LOCAL_KEYS).float()), -1)
        distance_and_local += torch.bmm(weight.transpose(0, 1), of_keys)
        if start == 0 and heard.first_key == 0:
            sink = weight[..., 0].clone()
    mean_distance, local = distance_and_local.permute(2, 1, 0)
    if heard.sink is not None:
        squares, mean_distance = squares / kept**2, mean_distance / kept
        neg_entropy = neg_entropy / kept - kept.log()
    log_ess2 = (-squares.log()).clamp(min=0)
    return torch.stack(
        [
            log_ess2.exp(),
            log_ess2,
            (-neg_entropy).clamp(min=0).exp(),
            largest.exp().clamp(max=1),
            sink.clamp(max=1),
            local.clamp(max=1),
            mean_distance.clamp(min=0),
        ]
    )


def _hidden(distance: Tensor, visible: Tensor | None) -> Tensor | None:
    """Which keys each row may not see, [rows, keys], or None where every row sees all of them.

    `visible` [rows] are the keys that each row sees, None for all up to its own.
    """
    hides_later = int(distance[0, -1]) < 0
    hides_earlier = visible is not None and bool((distance[:, 0] >= visible).any())
    if not hides_later and not hides_earlier:
        return None
    hidden = distance < 0
    return hidden if visible is None else hidden | (distance >= visible[:, None])


class AttentionRows:
    """Accumulates `row_statistics` into bins of visible keys, per layer and head, in float64.

    `rows` is None for every row, else how many log-spaced rows to take; `seed` jitters them.
    """

    name = "attention"

    def __init__(self, geometry: Geometry, length: int, rows: int | None, seed: int):
        self.geometry = geometry
        self.edges = torch.from_numpy(visible_edges(length))
        self.chosen = torch.arange(length) if rows is None else log_spaced(length, rows, seed)
        bins = (geometry.layers, len(self.edges))
        self.counts = torch.zeros(bins, dtype=torch.int64)
        self.sums = torch.zeros(len(STATISTICS), geometry.heads, *bins, dtype=torch.float64)

    def update(self, heard: Attention) -> None:
        """Take one layer of one full pass (as many queries as keys)."""
        rows = self.chosen.to(heard.q.device)
        statistics = row_statistics(heard, rows).double().cpu()
        bins = torch.bucketize(heard.visible[rows].cpu(), self.edges)
        self.counts[heard.layer] += torch.bincount(bins, minlength=len(self.edges))
        self.sums[:, :, heard.layer].index_add_(-1, bins, statistics)

    def merge(self, other: "AttentionRows") -> None:
        """Add what another accumulator of the same shape has seen."""
        self.counts += other.counts
        self.sums += other.sums

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `attention` table without model, length and doc; bins that no row fell into are left out."""
        layer, bin_ = self.counts.nonzero(as_tuple=True)
        heads = self.geometry.heads
        rows = self.counts[layer, bin_]
        means = self.sums[:, :, layer, bin_] / rows
        head = torch.arange(heads).repeat(len(layer))
        columns = {
            "layer": torch.tensor(self.geometry.numbers)[layer].repeat_interleave(heads),
            "head": head,
            "kv_group": head // self.geometry.heads_per_group,
            "visible": self.edges[bin_].repeat_interleave(heads),
            "rows": rows.repeat_interleave(heads),
            **{name: mean.T.reshape(-1) for name, mean in zip(STATISTICS, means, strict=True)},
        }
        return {name: column.numpy() for name, column in columns.items()}
