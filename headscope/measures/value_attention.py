"""Value-weighted attention: attention weights times the norm of what each key adds to the residual stream.

A head may give most weight to a key whose value is nearly 0, such as an attention sink: nothing is read there. With
w_ij = alpha_ij |W_O v_j| / sum_k alpha_ik |W_O v_k|, such keys stop counting (Kobayashi et al. 2020).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.binned_means import BinnedRowMeans
from headscope.measures.row_sampling import IntArray, items_per_tile, to_device

ROWS_PER_TILE = 16
"""Query rows at once: memory O(ROWS_PER_TILE x H x L)."""


class ValueWeightedRows(BinnedRowMeans):
    """Effective length and share of key 0 of attention rows, plain and value-weighted.

    `output_matrices` [H, D, dv] by layer index are what each number of z adds to the residual stream.
    """

    name = "values"
    statistic_names = ("log_ess2", "sink_share", "value_log_ess2", "value_sink_share")
    sink_statistics = frozenset({"sink_share", "value_sink_share"})

    def __init__(
        self,
        geometry: Geometry,
        length: int,
        n_rows: int | None,
        seed: int,
        output_matrices: Mapping[int, Tensor],
    ):
        super().__init__(geometry, length, n_rows, seed)
        self._grams = {layer: matrices.mT @ matrices for layer, matrices in output_matrices.items()}

    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor:
        """Statistics of query rows, [4, H, rows], float32, in the order of `statistic_names`.

        Both kinds of weights are those of the keys alone, renormalised to 1: a learned sink has no value.
        """
        norms, device = value_norms(record.v, self._grams[record.layer]), record.q.device
        size = items_per_tile(device, ROWS_PER_TILE, len(norms) * norms.shape[1])
        keys = torch.arange(norms.shape[1], device=device)
        tiles = []
        for start in range(0, len(rows), size):
            visible = keys[: int(rows[min(start + size, len(rows)) - 1]) + len(keys) - record.q.shape[1] + 1]
            tile = to_device(device, rows[start : start + size])
            log_plain = record.masked_logits(tile, visible).log_softmax(-1)
            log_weighted = (log_plain + norms[:, None, : len(visible)].log()).log_softmax(-1)
            tiles.append(torch.cat([_statistics(log, record.first_key) for log in (log_plain, log_weighted)]))
        return torch.cat(tiles, -1)


def value_norms(values: Tensor, grams: Tensor) -> Tensor:
    """|W_O v_j| of every query head and key, [H, Lk], float32 and positive.

    `values` [G, Lk, dv]; `grams` [H, dv, dv] are W_O^T W_O. A norm of 0 counts as the smallest positive number, so that
    a head whose values are all 0 keeps its plain weights.
    """
    v = values.float().repeat_interleave(len(grams) // len(values), 0)
    squares: Tensor = torch.linalg.vecdot(v @ grams.to(v), v)
    return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()


def _statistics(log_weights: Tensor, first_key: int) -> Tensor:
    """ln ESS_2 and the weight of key 0 of rows of log-weights [H, n, keys]: [2, H, n]."""
    log_ess2 = -(2 * log_weights).logsumexp(-1)
    sink = log_weights[..., 0].exp() if first_key == 0 else torch.zeros_like(log_ess2)
    return torch.stack([log_ess2.clamp(min=0), sink])
