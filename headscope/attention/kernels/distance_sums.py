"""Sums of q_f(i) . k_f(i - D) over the queries i, for several distances D at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.kernels import runtime
from headscope.attention.kernels.rotary_planes import pair_constants, pair_dimensions
from headscope.attention.record import AttentionRecord

DISTANCES, MAX_HEADS, QUERIES, PAIRS_AT_ONCE = 4, 4, 16, 32
"""Distances, query heads, queries and pairs of a tile."""
QUERY_PARTS = 16
"""Programs that share the queries of a text; their sums are added in float64."""


@triton.jit
def _distance_sums(
    Q, K, DISTANCE, OUT, q_head, q_row, k_head, k_row, out_part, out_head, out_pair, n_distances, n_queries,
    first_query, first_key, window, chunk,
    GROUP: tl.constexpr, R: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr,
    PAIRS: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    slot = tl.program_id(1) * BD + tl.arange(0, BD)
    parts_of_heads: tl.constexpr = (GROUP + R - 1) // R
    parts_of_pairs: tl.constexpr = (F + FB - 1) // FB
    unit = tl.program_id(2)
    group = unit // (parts_of_heads * parts_of_pairs)
    member = unit // parts_of_pairs % parts_of_heads * R + tl.arange(0, R)
    head = (group * GROUP + tl.minimum(member, GROUP - 1)).to(tl.int64)
    f = unit % parts_of_pairs * FB + tl.arange(0, FB)
    first, second = pair_dimensions(f, PAIRS, START, DIM, INTERLEAVED)
    is_pair = f < F
    distance = tl.load(DISTANCE + slot, mask=slot < n_distances, other=0).to(tl.int32)
    per_part = (n_queries + tl.num_programs(0) - 1) // tl.num_programs(0)
    stop = tl.minimum((part + 1) * per_part, n_queries)
    total = tl.zeros([R, BD, FB], tl.float32)
    for start in range(part * per_part, stop, BI):
        i = start + tl.arange(0, BI)
        own = i + first_query
        low = tl.zeros([BI], tl.int32)
        if window > 0:
            low = tl.maximum(own - window + 1, 0)
        if chunk > 0:
            low = tl.maximum((own + first_key) // chunk * chunk - first_key, low)
        j = own[None, :] - distance[:, None]
        visible = (j >= low[None, :]) & (i < stop)[None, :]
        key = K + group.to(tl.int64) * k_head + j[:, :, None].to(tl.int64) * k_row
        key_mask = visible[:, :, None] & is_pair[None, None, :]
        k_x = tl.load(key + first[None, None, :], mask=key_mask, other=0.0).to(tl.float32)
        k_y = tl.load(key + second[None, None, :], mask=key_mask, other=0.0).to(tl.float32)
        query = Q + head[:, None, None] * q_head + i[None, :, None].to(tl.int64) * q_row
        query_mask = (i < stop)[None, :, None] & is_pair[None, None, :]
        q_x = tl.load(query + first[None, None, :], mask=query_mask, other=0.0).to(tl.float32)
        q_y = tl.load(query + second[None, None, :], mask=query_mask, other=0.0).to(tl.float32)
        products = q_x[:, None] * k_x[None] + q_y[:, None] * k_y[None]
        total += tl.sum(products, 2)
    out = OUT + part.to(tl.int64) * out_part + head[:, None, None] * out_head
    out = out + f[None, None, :] * out_pair + slot[None, :, None]
    is_stored = (member < GROUP)[:, None, None] & (slot < n_distances)[None, :, None] & is_pair[None, None, :]
    tl.store(out, total, mask=is_stored)


def distance_sums(record: AttentionRecord, geometry: Geometry, distances: Tensor) -> Tensor:
    """Sum over the queries i of q_f(i) . k_f(i - D) for each distance D that they see: [H, F, D], float64, unscaled.

    `distances` [D] are int64, on the record's device; `geometry` is that of the layer.
    """
    q, k = runtime.unit_stride(record.q), runtime.unit_stride(record.k)
    heads, pairs, queries = geometry.heads, geometry.all_pairs, q.shape[1]
    per_group = heads // geometry.kv_groups
    heads_at_once = min(MAX_HEADS, triton.next_power_of_2(per_group))
    parts = max(1, min(QUERY_PARTS, queries // QUERIES))
    out = torch.empty(parts, heads, pairs, len(distances), dtype=torch.float32, device=q.device)
    units = geometry.kv_groups * triton.cdiv(per_group, heads_at_once) * triton.cdiv(pairs, PAIRS_AT_ONCE)
    runtime.launch(
        _distance_sums, (parts, triton.cdiv(len(distances), DISTANCES), units), q.device,
        q, k, distances, out, q.stride(0), q.stride(1), k.stride(0), k.stride(1), *out.stride()[:3], len(distances),
        queries, k.shape[1] - queries, record.first_key, record.window or 0, record.chunk_size or 0,
        GROUP=per_group, R=heads_at_once, F=pairs, FB=PAIRS_AT_ONCE, BD=DISTANCES, BI=QUERIES,
        **pair_constants(geometry), num_warps=4,
    )  # fmt: skip
    return out.double().sum(0)
