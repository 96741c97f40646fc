"""Contribution of each rotary pair to a head's logits.

A pair is a 2-D plane of q and k, and the logit is the sum of the contributions of its planes. c_ijf = scaling x
(q_f . k_f) is the contribution of pair f to logit s_ij; if logits are soft-capped, to the logit before the cap.
Its signed mean, its root mean square and the Cauchy-Schwarz bound |q_f| |k_f| are exact over all causal (i, j) in
O(L d): running sums over keys of k_f, k_f k_f^T and |k_f|, contracted with the queries. E |c_f|, the paper's "mean
absolute dot product", needs the pairs (i, j) themselves and is estimated from sampled rows.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.geometry import Geometry
from headscope.attention.kernels.runtime import attempt, runs_kernels
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    items_per_tile,
    pair_weighted_rows,
    query_range,
    rows_in_chunk,
    stratified_pair_quantiles,
    sums_beside,
    to_device,
    to_numpy,
)

UNITS_PER_CHUNK = 8
"""Rotary planes of KV groups contracted at once on a CPU, so that their running sums fit its cache."""
QUERIES_PER_CHUNK = 4096
"""Queries contracted at once: memory O(QUERIES_PER_CHUNK x d) in addition to the running sums."""
KEYS_PER_CHUNK = 2**14
"""Keys whose products with a row are in memory at once."""
TOKENS_PER_CHUNK = 4096
"""Tokens split into rotary planes at once: memory O(TOKENS_PER_CHUNK x d) in addition to the result."""


def rotary_planes(heads_tensor: Tensor, geometry: Geometry) -> Tensor:
    """Split q [H, L, d] or k [G, L, d] into rotary pairs: [2, G x F, H / G (or 1), L], float32, contiguous.

    `geometry` is that of the layer (`Geometry.at_layer`). The first axis holds the two coordinates of each pair, a 2-D
    plane. F is d / 2: the rotary pairs first, then the unrotated dimensions, paired in the same layout among
    themselves.
    """
    (heads, length, dim), groups = heads_tensor.shape, geometry.kv_groups
    planes = heads_tensor.new_empty(2, groups, geometry.all_pairs, heads // groups, length, dtype=torch.float32)
    size = items_per_tile(heads_tensor.device, TOKENS_PER_CHUNK, heads * dim)
    for tokens in (slice(start, start + size) for start in range(0, length, size)):
        pairs = pair_coordinates(heads_tensor[:, tokens], geometry)  # [2, heads, tokens, F]
        planes[..., tokens] = pairs.view(2, groups, heads // groups, *pairs.shape[2:]).permute(0, 1, 4, 2, 3)
    return planes.view(2, groups * geometry.all_pairs, -1, length)


def pair_coordinates(t: Tensor, geometry: Geometry) -> Tensor:
    """The two coordinates of each pair of dimensions: [heads, L, d] -> [2, heads, L, F], the rotary pairs first."""
    start, end = geometry.rotary_start, geometry.rotary_start + 2 * geometry.pairs
    rotary = _split_pairs(t[..., start:end], geometry.rotary_layout)
    if end - start == geometry.head_dim:
        return rotary
    rest = torch.cat((t[..., :start], t[..., end : geometry.head_dim]), -1)
    return torch.cat((rotary, _split_pairs(rest, geometry.rotary_layout)), -1)


def _split_pairs(t: Tensor, layout: str) -> Tensor:
    """[heads, L, 2F] -> [2, heads, L, F]."""
    half = t.shape[-1] // 2
    if layout == "half":
        return torch.stack((t[..., :half], t[..., half : 2 * half]))
    return torch.stack((t[..., 0 : 2 * half : 2], t[..., 1 : 2 * half : 2]))


def planes_by_head(t: Tensor, geometry: Geometry) -> Tensor:
    """[G x F, H / G] -> [H, F]: undo the grouping of `rotary_planes` with the same geometry of a layer."""
    return t.view(geometry.kv_groups, geometry.all_pairs, -1).transpose(1, 2).reshape(geometry.heads, -1)


def pair_moment_sums(q: Tensor, k: Tensor, visible_counts: Tensor | IntArray) -> Tensor:
    """Sums over all visible (i, j) of q_f.k_f, (q_f.k_f)^2 and |q_f| |k_f|: [3, G x F, H / G], float64, unscaled.

    q [2, G x F, H / G, Lq] and k [2, G x F, 1, Lk] are rotary planes; the queries belong to the last keys.
    `visible_counts` [Lq] is the number of keys that each query sees. Computed in float64, since the terms of
    (q_f.k_f)^2 cancel if q_f is nearly orthogonal to k_f.
    """
    size = items_per_tile(q.device, UNITS_PER_CHUNK, q[:, 0].numel())
    units = zip(torch.split(q, size, 1), torch.split(k, size, 1), strict=True)
    sums = [_unit_moment_sums(*of_units, visible_counts) for of_units in units]
    return sums[0] if len(sums) == 1 else torch.cat(sums, 1)


def _unit_moment_sums(q: Tensor, k: Tensor, visible_counts: Tensor | IntArray) -> Tensor:
    """`pair_moment_sums` of some units."""
    units, heads_per_group, count = q.shape[1:]
    start, size = k.shape[-1] - count, items_per_tile(q.device, QUERIES_PER_CHUNK, 12 * units * heads_per_group)
    hidden = np.arange(start, k.shape[-1]) - to_numpy(visible_counts)  # the last key that each query does not see
    first = start if (hidden < 0).all() else int(hidden.min()) + 1
    cumulative_moments = _key_moments(k[:, :, 0, first:]).cumsum_(-1)
    if start and (hidden < 0).all():
        for earlier_keys in torch.split(k[:, :, 0, :start], size // 4, -1):
            cumulative_moments += _key_moments(earlier_keys).sum(-1, keepdim=True)
    visible = cumulative_moments[..., start - first :]
    later = np.flatnonzero(hidden >= first)
    if len(later):
        hidden_moments = cumulative_moments.index_select(-1, to_device(q.device, hidden[later] - first))
        visible.index_add_(-1, to_device(q.device, later), hidden_moments, alpha=-1)
    sums = torch.zeros(3, units, heads_per_group, dtype=torch.float64, device=q.device)
    for begin in range(0, count, size):
        queries = slice(begin, begin + size)
        x, y = q[..., queries].double()
        per_query = (x, y, x * x, x * y, y * y, (x * x + y * y).sqrt())
        terms = [torch.bmm(a, b)[..., 0] for a, b in zip(per_query, visible[..., queries][..., None], strict=True)]
        sums += torch.stack([terms[0] + terms[1], terms[2] + terms[3] + terms[4], terms[5]])
    return sums


def _key_moments(k: Tensor) -> Tensor:
    """Terms x, y, x^2, 2 x y, y^2 and |k| of each key [2, G x F, L] for the running sums: [6, G x F, L], float64."""
    x, y = k.double()
    return torch.stack([x, y, x * x, 2 * x * y, y * y, (x * x + y * y).sqrt()])


def mean_abs_by_row(q: Tensor, k: Tensor, rows: Tensor | IntArray, visible_counts: Tensor | IntArray) -> Tensor:
    """Mean of |q_f . k_f| over the visible keys of query rows: [rows, G x F, H / G], float32, unscaled.

    q [2, G x F, H / G, Lq] and k [2, G x F, 1, Lk] are rotary planes; the queries belong to the last keys. `rows` are
    sorted indices of the queries, and `visible_counts` [rows] is the number of keys that each of them sees.
    """
    units, heads_per_group, count = q.shape[1:]
    indices, visible = to_numpy(rows), to_numpy(visible_counts)
    last = indices + k.shape[-1] - count
    first = last + 1 - visible
    q_rows = q.index_select(-1, to_device(q.device, indices))
    q_rows = q_rows.permute(3, 1, 2, 0).contiguous()  # [rows, G x F, H / G, 2]
    k_planes = k[:, :, 0].transpose(0, 1)  # [G x F, 2, Lk]
    begins, ends = to_device(q.device, np.stack((first, last)))[..., None]
    size = items_per_tile(q.device, 1, units * heads_per_group * k.shape[-1])
    key_step = items_per_tile(q.device, KEYS_PER_CHUNK, units * heads_per_group * size)
    sums = torch.zeros(len(last), units, heads_per_group, device=q.device)
    for tile in (slice(start, start + size) for start in range(0, len(last), size)):
        tile_queries = q_rows[tile].transpose(0, 1).flatten(1, 2)
        for begin in range(first[tile][0], last[tile][-1] + 1, key_step):
            end = min(begin + key_step, last[tile][-1] + 1)
            products = torch.bmm(tile_queries, k_planes[..., begin:end]).abs_()
            contribution = products.view(units, -1, heads_per_group, end - begin)
            if size > 1:
                keys = torch.arange(begin, end, device=q.device)
                hidden = keys > ends[tile]
                if (first[tile] > begin).any():
                    hidden |= keys < begins[tile]
                contribution.masked_fill_(hidden[:, None], 0)
            sums[tile] += contribution.sum(-1).transpose(0, 1)
    return sums / to_device(q.device, visible)[:, None, None]


def _plane_sums(
    record: AttentionRecord, geometry: Geometry, visible: IntArray, rows: IntArray, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`pair_moment_sums`, unscaled, and `_weighted_sums` of |c| of rows: two tensors [3, H, F]; None without rows."""
    q, k = rotary_planes(record.q, geometry), rotary_planes(record.k, geometry)
    moments = torch.stack([planes_by_head(t, geometry) for t in pair_moment_sums(q, k, visible)])
    if not len(rows):
        return moments, None
    means = mean_abs_by_row(q, k, rows, visible[rows]).double() * abs(record.scaling)
    weighted = _weighted_sums(means.flatten(1), weight)
    return moments, torch.stack([planes_by_head(t.view(means.shape[1:]), geometry) for t in weighted])


def _kernel_sums(
    record: AttentionRecord, geometry: Geometry, rows: IntArray, weight: Tensor
) -> tuple[Tensor, Tensor | None] | None:
    """The results of `_plane_sums` from the GPU's kernels; None if they do not run."""
    if not runs_kernels(record):
        return None
    from headscope.attention.kernels.pair_moments import pair_moments
    from headscope.attention.kernels.pair_products import mean_abs_products

    moments = attempt(pair_moments, record, geometry)
    if moments is None or not len(rows):
        return None if moments is None else (moments, None)
    means = attempt(mean_abs_products, record, geometry, to_device(record.q.device, rows))
    if means is None:
        return None
    weighted = _weighted_sums(means.double().flatten(1) * abs(record.scaling), weight)
    return moments, weighted.view(3, *means.shape[1:])


def _weighted_sums(means: Tensor, weight: Tensor) -> Tensor:
    """Sums of w m, w^2 m and w^2 m^2 for row means m [rows, n] with weights w: the causal pairs of a row. [3, n]."""
    weight = without_waiting(means.device, weight)
    return torch.stack([weight @ means, weight**2 @ means, weight**2 @ means**2])


class RotaryPairs:
    """Accumulates pair contributions per layer and head.

    `n_sampled_rows` is the number of rows to sample for E |c|, None for every row; `seed` seeds the sample.
    """

    name = "pairs"

    def __init__(self, geometry: Geometry, length: int, n_sampled_rows: int | None, seed: int):
        self.geometry = geometry
        self.length = length
        self.n_sampled_rows = n_sampled_rows
        self.pair_quantiles = None if n_sampled_rows is None else stratified_pair_quantiles(n_sampled_rows, seed)
        # `pair_moment_sums` in logit units, and `_weighted_sums` of the row means of |c|.
        self.sums = torch.zeros(6, geometry.layers, geometry.heads, geometry.all_pairs, dtype=torch.float64)
        self.visible_pair_count = torch.zeros(geometry.layers, dtype=torch.float64)
        self.weight_sums = torch.zeros(2, geometry.layers, dtype=torch.float64)
        self.sampled_row_count = torch.zeros(geometry.layers, dtype=torch.int64)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        layer, scaling = record.layer, record.scaling
        geometry = self.geometry.at_layer(layer)
        document_visible = count_visible_keys(record, np.arange(self.length))
        visible = document_visible[query_range(record)]
        rows, weight = self._sample_rows(record, document_visible)
        sums = _kernel_sums(record, geometry, rows, weight)
        moments, weighted = _plane_sums(record, geometry, visible, rows, weight) if sums is None else sums
        self.sums = sums_beside(self.sums, moments)
        of_layer = self.sums[:, layer, : geometry.heads, : geometry.all_pairs]
        for row, factor in enumerate((scaling, scaling**2, abs(scaling))):
            of_layer[row] += moments[row].to(of_layer.device) * factor
        self.visible_pair_count[layer] += float(visible.sum())
        if weighted is None:
            return
        of_layer[3:] += weighted.to(of_layer.device)
        self.weight_sums[:, layer] += torch.stack([weight.sum(), (weight**2).sum()])
        self.sampled_row_count[layer] += len(rows)

    def _sample_rows(self, record: AttentionRecord, visible_counts: IntArray) -> tuple[IntArray, Tensor]:
        """Indices of the sampled queries, and the number of the document's pairs that each represents."""
        if self.pair_quantiles is None:
            queries = query_range(record)
            return np.arange(queries.stop - queries.start), torch.from_numpy(visible_counts[queries]).double()
        rows = rows_in_chunk(pair_weighted_rows(visible_counts, self.pair_quantiles), record)
        return rows, torch.full(
            (len(rows),), float(visible_counts.sum()) / len(self.pair_quantiles), dtype=torch.float64
        )

    def merge(self, other: "RotaryPairs") -> None:
        """Add the sums of another accumulator of the same shape."""
        for name in ("sums", "visible_pair_count", "weight_sums", "sampled_row_count"):
            own = getattr(self, name)
            setattr(self, name, own + getattr(other, name).to(own.device))

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `pairs` table without model, length, doc and theta, for layers with records."""
        layers = self.sampled_row_count.nonzero()[:, 0]
        sums = self.sums.cpu()[:, layers]
        signed, square, norm = sums[:3] / self.visible_pair_count[layers, None, None]
        total, total_of_squares = self.weight_sums[:, layers, None, None]
        first, second, third = sums[3:]
        mean = first / total
        spread = (third - 2 * mean * second + mean**2 * total_of_squares).clamp(min=0)
        count = self.sampled_row_count[layers, None, None].double()
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
            layers, torch.arange(geometry.heads), torch.arange(geometry.all_pairs), indexing="ij"
        )
        number, group = torch.tensor(geometry.layer_numbers)[layer], geometry.kv_group(layer, head)
        keys = {"layer": number, "head": head, "kv_group": group, "pair": pair}
        exists = geometry.has_pair(layer, head, pair)
        return {name: column[exists].numpy() for name, column in {**keys, **values}.items()}
