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
from headscope.attention.record import AttentionRecord
from headscope.measures.rotary_planes import planes_by_head, rotary_planes
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    pair_weighted_rows,
    query_range,
    rows_in_chunk,
    stratified_pair_quantiles,
    to_device,
    to_numpy,
)
from headscope.measures.tiles import items_per_tile

QUERIES_PER_CHUNK = 4096
"""Queries contracted at once: memory O(MOMENT_CHUNK x d) beyond the running sums."""
KEYS_PER_CHUNK = 2**14
"""Keys whose products with a row are held at once."""


def pair_moment_sums(q: Tensor, k: Tensor, visible_counts: Tensor | IntArray) -> Tensor:
    """Sums over all visible (i, j) of q_f.k_f, (q_f.k_f)^2 and |q_f| |k_f|: [3, G x F, H / G], float64, unscaled.

    q [2, G x F, H / G, Lq] and k [2, G x F, 1, Lk] are planes, the queries the last of the keys; `visible` [Lq] how
    many keys each query sees. All in float64: where q_f is nearly orthogonal to k_f, the terms of (q_f.k_f)^2 cancel.
    """
    units, of_group, count = q.shape[1:]
    start, size = k.shape[-1] - count, items_per_tile(q.device, QUERIES_PER_CHUNK, 12 * units * of_group)
    hidden = np.arange(start, k.shape[-1]) - to_numpy(visible_counts)  # the last key that the query does not see
    first = start if (hidden < 0).all() else int(hidden.min()) + 1
    running = _key_moments(k[:, :, 0, first:]).cumsum_(-1)
    if start and (hidden < 0).all():
        for before in torch.split(k[:, :, 0, :start], size // 4, -1):
            running += _key_moments(before).sum(-1, keepdim=True)
    seen = running[..., start - first :]
    later = np.flatnonzero(hidden >= first)
    if len(later):
        before = running.index_select(-1, to_device(q.device, hidden[later] - first))
        seen.index_add_(-1, to_device(q.device, later), before, alpha=-1)
    sums = torch.zeros(3, units, of_group, dtype=torch.float64, device=q.device)
    for at in range(0, count, size):
        cut = slice(at, at + size)
        x, y = q[..., cut].double()
        per_query = (x, y, x * x, x * y, y * y, (x * x + y * y).sqrt())
        terms = [torch.bmm(a, b)[..., 0] for a, b in zip(per_query, seen[..., cut][..., None], strict=True)]
        sums += torch.stack([terms[0] + terms[1], terms[2] + terms[3] + terms[4], terms[5]])
    return sums


def _key_moments(k: Tensor) -> Tensor:
    """What is summed over keys [2, G x F, L]: x, y, x^2, 2 x y, y^2 and the norm, [6, G x F, L], float64."""
    x, y = k.double()
    return torch.stack([x, y, x * x, 2 * x * y, y * y, (x * x + y * y).sqrt()])


def mean_abs_by_row(q: Tensor, k: Tensor, rows: Tensor | IntArray, visible_counts: Tensor | IntArray) -> Tensor:
    """Mean of |q_f . k_f| over the visible keys of given rows: [rows, G x F, H / G], float32, unscaled.

    q [2, G x F, H / G, Lq] and k [2, G x F, 1, Lk] are planes, the queries the last of the keys; `rows` index the
    queries, sorted, and `visible` [rows] are the keys that each of them sees.
    """
    units, of_group, count = q.shape[1:]
    taken, seen = to_numpy(rows), to_numpy(visible_counts)
    last = taken + k.shape[-1] - count
    first = last + 1 - seen
    q_rows = q.index_select(-1, to_device(q.device, taken)).permute(3, 1, 2, 0).contiguous()  # [rows, G x F, H / G, 2]
    k_planes = k[:, :, 0].transpose(0, 1)  # [G x F, 2, Lk]
    begins, ends = to_device(q.device, np.stack((first, last)))[..., None]
    size = items_per_tile(q.device, 1, units * of_group * k.shape[-1])
    run = items_per_tile(q.device, KEYS_PER_CHUNK, units * of_group * size)
    sums = torch.zeros(len(last), units, of_group, device=q.device)
    for tile in (slice(at, at + size) for at in range(0, len(last), size)):
        of_tile = q_rows[tile].transpose(0, 1).flatten(1, 2)
        for begin in range(first[tile][0], last[tile][-1] + 1, run):
            end = min(begin + run, last[tile][-1] + 1)
            contribution = torch.bmm(of_tile, k_planes[..., begin:end]).abs_().view(units, -1, of_group, end - begin)
            if size > 1:
                keys = torch.arange(begin, end, device=q.device)
                hidden = keys > ends[tile]
                if (first[tile] > begin).any():
                    hidden |= keys < begins[tile]
                contribution.masked_fill_(hidden[:, None], 0)
            sums[tile] += contribution.sum(-1).transpose(0, 1)
    return sums / to_device(q.device, seen)[:, None, None]


class RotaryPairs:
    """Accumulates pair contributions per layer and head.

    `rows` is None to use every row for E |c|, else how many to sample; `seed` draws them.
    """

    name = "pairs"

    def __init__(self, geometry: Geometry, length: int, n_sampled_rows: int | None, seed: int):
        self.geometry = geometry
        self.length = length
        self.n_sampled_rows = n_sampled_rows
        self.pair_quantiles = None if n_sampled_rows is None else stratified_pair_quantiles(n_sampled_rows, seed)
        shape = (geometry.layers, geometry.heads, geometry.all_pairs)
        self.moments = torch.zeros(3, *shape, dtype=torch.float64)
        self.visible_pair_count = torch.zeros(geometry.layers, dtype=torch.float64)
        # Row means m with weights w, the causal pairs that a row stands for: sums of w m, w^2 m and w^2 m^2.
        self.weighted_sums = torch.zeros(3, *shape, dtype=torch.float64)
        self.weight_sums = torch.zeros(2, geometry.layers, dtype=torch.float64)
        self.sampled_row_count = torch.zeros(geometry.layers, dtype=torch.int64)

    def update(self, record: AttentionRecord) -> None:
        """Take what a layer computed for a document, or for the next chunk of its queries."""
        geometry, layer = self.geometry, record.layer
        of_document = count_visible_keys(record, np.arange(self.length))
        visible = of_document[query_range(record)]
        q, k = rotary_planes(record.q, geometry), rotary_planes(record.k, geometry)
        scale = torch.tensor([record.scaling, record.scaling**2, abs(record.scaling)], dtype=torch.float64)
        sums = torch.stack([planes_by_head(t, geometry) for t in pair_moment_sums(q, k, visible)]).cpu()
        self.moments[:, layer] += sums * scale[:, None, None]
        self.visible_pair_count[layer] += float(visible.sum())
        rows, weight = self._sample_rows(record, of_document)
        if not len(rows):
            return
        means = mean_abs_by_row(q, k, rows, visible[rows]).double().cpu() * abs(record.scaling)
        by_power = torch.stack(
            [weight @ means.flatten(1), weight**2 @ means.flatten(1), weight**2 @ means.flatten(1) ** 2]
        )
        self.weighted_sums[:, layer] += torch.stack(
            [planes_by_head(t.view(means.shape[1:]), geometry) for t in by_power]
        )
        self.weight_sums[:, layer] += torch.stack([weight.sum(), (weight**2).sum()])
        self.sampled_row_count[layer] += len(rows)

    def _sample_rows(self, record: AttentionRecord, visible_counts: IntArray) -> tuple[IntArray, Tensor]:
        """The queries whose rows are taken, and how many of the document's pairs each stands for."""
        if self.pair_quantiles is None:
            here = query_range(record)
            return np.arange(here.stop - here.start), torch.from_numpy(visible_counts[here]).double()
        rows = rows_in_chunk(pair_weighted_rows(visible_counts, self.pair_quantiles), record)
        return rows, torch.full(
            (len(rows),), float(visible_counts.sum()) / len(self.pair_quantiles), dtype=torch.float64
        )

    def merge(self, other: "RotaryPairs") -> None:
        """Add what another accumulator of the same shape has seen."""
        for name in ("moments", "visible_pair_count", "weighted_sums", "weight_sums", "sampled_row_count"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `pairs` table without model, length, doc and theta, for the layers seen."""
        seen = self.sampled_row_count.nonzero()[:, 0]
        signed, square, norm = self.moments[:, seen] / self.visible_pair_count[seen, None, None]
        total, total_of_squares = self.weight_sums[:, seen, None, None]
        first, second, third = self.weighted_sums[:, seen]
        mean = first / total
        spread = (third - 2 * mean * second + mean**2 * total_of_squares).clamp(min=0)
        count = self.sampled_row_count[seen, None, None].double()
        error = (spread * count / (count - 1).clamp(min=1)).sqrt() / total
        values = {
            "mean_abs": mean,
            "mean_abs_se": torch.zeros_like(error) if self.n_sampled_rows is None else error,
            "mean_signed": signed,
            "rms": square.clamp(min=0).sqrt(),
            "norm_product": norm,
        }
        geometry = self.geometry
        layer, head, pair = torch.meshgrid(
            seen, torch.arange(geometry.heads), torch.arange(geometry.all_pairs), indexing="ij"
        )
        layer = torch.tensor(geometry.layer_numbers)[layer]
        keys = {"layer": layer, "head": head, "kv_group": head // geometry.heads_per_group, "pair": pair}
        return {name: column.reshape(-1).numpy() for name, column in {**keys, **values}.items()}
