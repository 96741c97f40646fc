"""Effective length and shape of attention rows, streamed: no L x L matrix, whatever the number of rows.

ln ESS_2 = 2 lse(s) - lse(2 s) = -ln sum_j alpha_ij^2 (paper, section on AdaScale; appendix, effective sequence length).
The log-sum-exp comes from the fused kernel that computed the output; rows are then visited in tiles that fit the cache.
"""

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.measures.row_means import RowMeans
from headscope.measures.row_sampling import Places, on, on_host, queries, visible_keys
from headscope.measures.tiles import per_tile

LOCAL_KEYS = 32
STATISTICS = ("ess2", "log_ess2", "ess1", "max_weight", "sink_mass", "local_mass", "mean_distance")
ROW_TILE, KEY_TILE = 64, 512
NEVER = -1e30
"""Logit of a masked key: exp gives 0, and 0 x NEVER is still 0 where -inf would give NaN."""


def row_statistics(heard: AttentionRecord, rows: Tensor | Places) -> Tensor:
    """Statistics of the given query rows, [len(STATISTICS), H, rows], float32, in the order of `STATISTICS`.

    Ranges: 1 <= ess2 <= ess1 <= visible keys; weights in [0, 1]; mean_distance in tokens, >= 0. `rows` index the
    queries, sorted ascending. Accumulated in log-space relative to the row's log-sum-exp, in float32.

    A learned sink takes its share of every row. `max_weight`, `sink_mass` (of key 0) and `local_mass` are the weights
    that are left to keys; effective lengths and distance are of what is left, as shares of it, so that a head which
    gives nearly all to its sink does not seem to attend to more keys than there are.
    """
    places, size = on_host(rows), per_tile(heard.q.device, ROW_TILE, heard.q.shape[0] * heard.k.shape[1])
    tiles = [_tile_statistics(heard, places[start : start + size]) for start in range(0, len(places), size)]
    return torch.cat(tiles, -1)


def _tile_statistics(heard: AttentionRecord, places: Places) -> Tensor:
    """`row_statistics` of one tile of rows: one sweep over their keys."""
    (heads, count, _), (groups, keys, dim) = heard.q.shape, heard.k.shape
    shape = (heads, len(places))
    device, own = heard.q.device, places + keys - count
    seen = visible_keys(heard, places + queries(heard).start)
    first, last = int(own[0] - seen[0]) + 1, int(own[-1])
    rows, at, visible = on(device, np.stack((places, own, seen)))
    q = heard.q[:, rows].float().reshape(groups, -1, dim)
    minus_lse = -heard.lse[:, rows].float().reshape(groups, -1, 1)
    largest = torch.full(shape, NEVER, device=device)
    squares, neg_entropy, sink, kept = (torch.zeros(shape, device=device) for _ in range(4))
    distance_and_local = torch.zeros(shape[1], shape[0], 2, device=device)
    size = per_tile(device, KEY_TILE, heads * len(places))
    for start in range(first, last + 1, size):
        stop = min(start + size, last + 1)
        scaled = heard.k[:, start:stop].float().transpose(1, 2) * heard.scaling
        log_weight = (
            torch.baddbmm(minus_lse, q, scaled) if heard.cap is None else heard.capped(torch.bmm(q, scaled)) + minus_lse
        ).view(*shape, -1)
        distance = at[:, None] - torch.arange(start, stop, device=device)
        if own[0] + 1 < stop:
            log_weight.masked_fill_(distance < 0, NEVER)
        if (own - start >= seen).any():
            log_weight.masked_fill_(distance >= visible[:, None], NEVER)
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


class AttentionRows(RowMeans):
    """Means of `row_statistics`: the `attention` table."""

    name = "attention"
    statistics = STATISTICS

    def of_rows(self, heard: AttentionRecord, rows: Places) -> Tensor:
        return row_statistics(heard, rows)
