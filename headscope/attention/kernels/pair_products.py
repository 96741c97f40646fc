"""Mean of |q_f . k_f| over the visible keys of query rows, by rotary pair f, without the products in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.kernels import runtime
from headscope.attention.kernels.rotary_planes import pair_constants, pair_dimensions
from headscope.attention.record import AttentionRecord

MAX_HEADS_PER_PROGRAM, ELEMENTS_PER_TILE = 4, 2**13
"""Query heads that share the keys of a program; products of a tile: heads x keys x pairs."""


@triton.jit
def _mean_abs_products(
    Q, K, ROWS, OUT, q_head, q_row, k_head, k_row, out_row, out_head, first_query, first_key, window, chunk,
    GROUP: tl.constexpr, R: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, BN: tl.constexpr, PAIRS: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    slot = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    part = tl.program_id(1)
    parts: tl.constexpr = (GROUP + R - 1) // R
    group = part // parts
    member = part % parts * R + tl.arange(0, R)
    head = (group * GROUP + tl.minimum(member, GROUP - 1)).to(tl.int64)
    row = tl.load(ROWS + slot)
    own = (row + first_query).to(tl.int32)
    low = 0
    if window > 0:
        low = tl.maximum(own - window + 1, 0)
    if chunk > 0:
        low = tl.maximum((own + first_key) // chunk * chunk - first_key, low)
    f = tl.arange(0, FP)
    first, second = pair_dimensions(f, PAIRS, START, DIM, INTERLEAVED)
    is_pair = f < F
    q_row_base = Q + head[:, None] * q_head + row * q_row
    q_x = tl.load(q_row_base + first[None, :], mask=is_pair[None, :], other=0.0).to(tl.float32)
    q_y = tl.load(q_row_base + second[None, :], mask=is_pair[None, :], other=0.0).to(tl.float32)
    total = tl.zeros([R, FP], tl.float32)
    for start in range(low, own + 1, BN):
        j = start + tl.arange(0, BN)
        key = K + group.to(tl.int64) * k_head + j[:, None].to(tl.int64) * k_row
        mask = (j[:, None] <= own) & is_pair[None, :]
        k_x = tl.load(key + first[None, :], mask=mask, other=0.0).to(tl.float32)
        k_y = tl.load(key + second[None, :], mask=mask, other=0.0).to(tl.float32)
        products = q_x[:, None, :] * k_x[None, :, :] + q_y[:, None, :] * k_y[None, :, :]
        total += tl.sum(tl.abs(products), 1)
    out = OUT + slot.to(tl.int64) * out_row + head[:, None] * out_head + f[None, :]
    tl.store(out, total / (own - low + 1), mask=is_pair[None, :] & (member[:, None] < GROUP))


def mean_abs_products(record: AttentionRecord, geometry: Geometry, rows: Tensor) -> Tensor:
    """Mean of |q_f . k_f| over the visible keys of query rows: [rows, H, F], float32, unscaled.

    `rows` are ascending indices of the record's queries, int64 on its device; `geometry` is that of the layer.
    """
    q, k = runtime.unit_stride(record.q), runtime.unit_stride(record.k)
    per_group = geometry.heads // geometry.kv_groups
    heads_at_once = min(MAX_HEADS_PER_PROGRAM, triton.next_power_of_2(per_group))
    pairs = triton.next_power_of_2(geometry.all_pairs)
    out = torch.empty(len(rows), geometry.heads, geometry.all_pairs, dtype=torch.float32, device=q.device)
    runtime.launch(
        _mean_abs_products, (len(rows), geometry.kv_groups * triton.cdiv(per_group, heads_at_once)), q.device,
        q, k, rows, out, q.stride(0), q.stride(1), k.stride(0), k.stride(1), out.stride(0), out.stride(1),
        k.shape[1] - q.shape[1], record.first_key, record.window or 0, record.chunk_size or 0,
        GROUP=per_group, R=heads_at_once, F=geometry.all_pairs, FP=pairs,
        BN=max(1, ELEMENTS_PER_TILE // (heads_at_once * pairs)), **pair_constants(geometry), num_warps=4,
    )  # fmt: skip
    return out
