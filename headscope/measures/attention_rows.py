"""Effective length and shape of attention rows, streamed: no L x L matrix, whatever the number of rows.

ln ESS_2 = 2 lse(s) - lse(2 s) = -ln sum_j alpha_ij^2 (paper, section on AdaScale; appendix, effective sequence length).
The log-sum-exp comes from the fused kernel that computed the output; rows are then visited in tiles that fit the cache.
"""

import torch
from torch import Tensor

from headscope.attention.heard import Attention
from headscope.measures.row_means import RowMeans

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


class AttentionRows(RowMeans):
    """Means of `row_statistics`: the `attention` table."""

    name = "attention"
    statistics = STATISTICS

    def of_rows(self, heard: Attention, rows: Tensor) -> Tensor:
        return row_statistics(heard, rows)
