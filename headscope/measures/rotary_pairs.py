"""How much each rotary pair contributes to a head's logits.

c_ijf = scaling x (q_f . k_f), the contribution of pair f to logit s_ij, before its cap where logits are soft-capped:
only there do the pairs add up. Its signed mean, its root mean square and the
Cauchy-Schwarz bound |q_f| |k_f| are exact over all causal (i, j) in O(L d): running sums over keys of k_f, k_f k_f^T
and |k_f|, contracted with the queries. E |c_f|, the paper's "mean absolute dot product", needs the pairs (i, j)
themselves and is estimated from sampled rows.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.heard import Attention
from headscope.measures.planes import by_head, planes
from headscope.measures.rows import pair_spaced

MOMENT_CHUNK = 4096
"""Queries contracted at once: memory O(MOMENT_CHUNK x d) beyond the running sums."""


def moment_sums(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Sums over all visible (i, j) of q_f.k_f, (q_f.k_f)^2 and |q_f| |k_f|: [3, G x F, H / G], float64, unscaled.

    q [2, G x F, H / G, L] and k [2, G x F, 1, L] are planes, `visible` [L] the keys that each query sees. All in
    float64: where q_f is nearly orthogonal to k_f, the terms of (q_f.k_f)^2 cancel.
    """
    kx, ky = k[:, :, 0].double()
    running = torch.stack([kx, ky, kx * kx, 2 * kx * ky, ky * ky, (kx * kx + ky * ky).sqrt()]).cumsum_(-1)
    before = torch.arange(len(visible), device=q.device) - visible  # the last key that the query does not see
    hides = before >= 0
    if hides.any():
        running[..., hides] -= running[..., before[hides]]
    sums = torch.zeros(3, *q.shape[1:3], dtype=torch.float64, device=q.device)
    for start in range(0, q.shape[-1], MOMENT_CHUNK):
        cut = slice(start, start + MOMENT_CHUNK)
        x, y = q[..., cut].double()
        per_query = (x, y, x * x, x * y, y * y, (x * x + y * y).sqrt())
        seen = running[..., cut][..., None]
        terms = [torch.bmm(a, b)[..., 0] for a, b in zip(per_query, seen, strict=True)]
        sums += torch.stack([terms[0] + terms[1], terms[2] + terms[3] + terms[4], terms[5]])
    return sums


def row_means(q: Tensor, k: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Mean of |q_f . k_f| over the visible keys of each given row: [rows, G x F, H / G], float32, unscaled."""
    q_rows = q[..., rows].permute(3, 1, 2, 0).contiguous()  # [rows, G x F, H / G, 2]
    k_planes = k[:, :, 0].transpose(0, 1).contiguous()  # [G x F, 2, L]
    means = []
    for q_row, row, seen in zip(q_rows, rows.tolist(), visible.tolist(), strict=True):
        contribution = torch.bmm(q_row, k_planes[..., row + 1 - seen : row + 1])
        means.append(contribution.abs_().sum(-1) / seen)
    return torch.stack(means)


class RotaryPairs:
    """Accumulates pair contributions per layer and head.

    `rows` is None to use every row for E |c|, else how many to sample; `seed` draws them.
    """

    name = "pairs"

    def __init__(self, geometry: Geometry, length: int, rows: int | None, seed: int):
        self.geometry = geometry
        self.length = length
        self.rows = rows
        self.seed = seed
        shape = (geometry.layers, geometry.heads, geometry.all_pairs)
        self.moments = torch.zeros(3, *shape, dtype=torch.float64)
        self.pairs_seen = torch.zeros(geometry.layers, dtype=torch.float64)
        # Row means m with weights w, the causal pairs that a row stands for: sums of w m, w^2 m and w^2 m^2.
        self.weighted = torch.zeros(3, *shape, dtype=torch.float64)
        self.weights = torch.zeros(2, geometry.layers, dtype=torch.float64)
        self.sampled = torch.zeros(geometry.layers, dtype=torch.int64)

    def update(self, heard: Attention) -> None:
        """Take one layer of one full pass (as many queries as keys)."""
        geometry, layer, visible = self.geometry, heard.layer, heard.visible
        q, k = planes(heard.q, geometry), planes(heard.k, geometry)
        scale = torch.tensor([heard.scaling, heard.scaling**2, abs(heard.scaling)], dtype=torch.float64)
        sums = torch.stack([by_head(t, geometry) for t in moment_sums(q, k, visible)]).cpu()
        self.moments[:, layer] += sums * scale[:, None, None]
        pairs = float(visible.sum())
        self.pairs_seen[layer] += pairs
        if self.rows is None:
            rows = torch.arange(self.length, device=q.device)
            weight = visible.double().cpu()
        else:
            rows = pair_spaced(visible, self.rows, self.seed)
            weight = torch.full((len(rows),), pairs / len(rows), dtype=torch.float64)
        means = row_means(q, k, rows, visible[rows]).double().cpu() * abs(heard.scaling)
        by_power = torch.stack(
            [weight @ means.flatten(1), weight**2 @ means.flatten(1), weight**2 @ means.flatten(1) ** 2]
        )
        self.weighted[:, layer] += torch.stack([by_head(t.view(means.shape[1:]), geometry) for t in by_power])
        self.weights[:, layer] += torch.stack([weight.sum(), (weight**2).sum()])
        self.sampled[layer] += len(rows)

    def merge(self, other: "RotaryPairs") -> None:
        """Add what another accumulator of the same shape has seen."""
        for name in ("moments", "pairs_seen", "weighted", "weights", "sampled"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `pairs` table without model, length, doc and theta, for the layers seen."""
        seen = self.sampled.nonzero()[:, 0]
        signed, square, norm = self.moments[:, seen] / self.pairs_seen[seen, None, None]
        total, total_of_squares = self.weights[:, seen, None, None]
        first, second, third = self.weighted[:, seen]
        mean = first / total
        spread = (third - 2 * mean * second + mean**2 * total_of_squares).clamp(min=0)
        count = self.sampled[seen, None, None].double()
        error = (spread * count / (count - 1).clamp(min=1)).sqrt() / total
        values = {
            "mean_abs": mean,
            "mean_abs_se": torch.zeros_like(error) if self.rows is None else error,
            "mean_signed": signed,
            "rms": square.clamp(min=0).sqrt(),
            "norm_product": norm,
        }
        geometry = self.geometry
        layer, head, pair = torch.meshgrid(
            seen, torch.arange(geometry.heads), torch.arange(geometry.all_pairs), indexing="ij"
        )
        layer = torch.tensor(geometry.numbers)[layer]
        keys = {"layer": layer, "head": head, "kv_group": head // geometry.heads_per_group, "pair": pair}
        return {name: column.reshape(-1).numpy() for name, column in {**keys, **values}.items()}
