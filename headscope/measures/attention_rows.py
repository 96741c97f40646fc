"""Effective length and shape of attention rows, streamed: no L x L matrix, whatever the number of rows.

ln ESS_2 = 2 lse(s) - lse(2 s) = -ln sum_j alpha_ij^2 (paper, section on AdaScale; appendix, effective sequence length).
The log-sum-exp comes from the fused kernel that computed the output; rows are then visited in tiles that fit the cache.
"""

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.measures.row_means import BinnedRowMeans
from headscope.measures.row_sampling import IntArray, count_visible_keys, query_range, to_device, to_numpy
from headscope.measures.tiles import items_per_tile

LOCAL_DISTANCE = 32
ROW_STATISTICS = ("ess2", "log_ess2", "ess1", "max_weight", "sink_mass", "local_mass", "mean_distance")
ROW_TILE, KEY_TILE = 64, 512
MASKED_LOGIT = -1e30
"""Logit of a masked key: exp gives 0, and 0 x NEVER is still 0 where -inf would give NaN."""


def row_statistics(record: AttentionRecord, rows: Tensor | IntArray) -> Tensor:
    """Statistics of the given query rows, [len(STATISTICS), H, rows], float32, in the order of `STATISTICS`.

    Ranges: 1 <= ess2 <= ess1 <= visible keys; weights in [0, 1]; mean_distance in tokens, >= 0. `rows` index the
    queries, sorted ascending. Accumulated in log-space relative to the row's log-sum-exp, in float32.

    A learned sink takes its share of every row. `max_weight`, `sink_mass` (of key 0) and `local_mass` are the weights
    that are left to keys; effective lengths and distance are of what is left, as shares of it, so that a head which
    gives nearly all to its sink does not seem to attend to more keys than there are.
    """
    places, size = to_numpy(rows), items_per_tile(record.q.device, ROW_TILE, record.q.shape[0] * record.k.shape[1])
    tiles = [_tile_statistics(record, places[start : start + size]) for start in range(0, len(places), size)]
    return torch.cat(tiles, -1)


def _tile_statistics(record: AttentionRecord, row_indices: IntArray) -> Tensor:
    """`row_statistics` of one tile of rows: one sweep over their keys."""
    (heads, count, _), (groups, keys, dim) = record.q.shape, record.k.shape
    shape = (heads, len(row_indices))
    device, own = record.q.device, row_indices + keys - count
    seen = count_visible_keys(record, row_indices + query_range(record).start)
    first, last = int(own[0] - seen[0]) + 1, int(own[-1])
    rows, at, visible = to_device(device, np.stack((row_indices, own, seen)))
    q = record.q[:, rows].float().reshape(groups, -1, dim)
    minus_lse = -record.lse[:, rows].float().reshape(groups, -1, 1)
    largest = torch.full(shape, MASKED_LOGIT, device=device)
    squares, neg_entropy, sink, kept = (torch.zeros(shape, device=device) for _ in range(4))
    distance_and_local = torch.zeros(shape[1], shape[0], 2, device=device)
    size = items_per_tile(device, KEY_TILE, heads * len(row_indices))
    for start in range(first, last + 1, size):
        stop = min(start + size, last + 1)
        scaled = record.k[:, start:stop].float().transpose(1, 2) * record.scaling
        log_weight = (
            torch.baddbmm(minus_lse, q, scaled)
            if record.cap is None
            else record.soft_cap(torch.bmm(q, scaled)) + minus_lse
        ).view(*shape, -1)
        distance = at[:, None] - torch.arange(start, stop, device=device)
        if own[0] + 1 < stop:
            log_weight.masked_fill_(distance < 0, MASKED_LOGIT)
        if (own - start >= seen).any():
            log_weight.masked_fill_(distance >= visible[:, None], MASKED_LOGIT)
        weight = log_weight.exp()
        largest = torch.maximum(largest, log_weight.amax(-1))
        squares += torch.linalg.vecdot(weight, weight)
        neg_entropy += torch.linalg.vecdot(weight, log_weight)
        if record.sink is not None:
            kept += weight.sum(-1)
        # Distances, not key indices: far from the start a mean index minus the row's own would lose its digits.
        of_keys = torch.stack((distance.float(), (distance < LOCAL_DISTANCE).float()), -1)
        distance_and_local += torch.bmm(weight.transpose(0, 1), of_keys)
        if start == 0 and record.first_key == 0:
            sink = weight[..., 0].clone()
    mean_distance, local = distance_and_local.permute(2, 1, 0)
    if record.sink is not None:
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


class AttentionRows(BinnedRowMeans):
    """Means of `row_statistics`: the `attention` table."""

    name = "attention"
    statistic_names = ROW_STATISTICS

    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor:
        return row_statistics(record, rows)
