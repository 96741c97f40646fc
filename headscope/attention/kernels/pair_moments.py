"""Sums of q_f . k_f, (q_f . k_f)^2 and |q_f| |k_f| over all visible (i, j), from running sums over keys, in float64.

Keys are cut into blocks. The first kernel adds up the moments of each block; the second adds the running sum within a
block to that of the blocks before, and contracts it with the queries. For a window, the sums over hidden keys are
subtracted. They are those of a causal pass whose queries are shifted `window` keys back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.kernel import chunk_slices
from headscope.attention.kernels import runtime
from headscope.attention.kernels.rotary_planes import pair_constants, pair_dimensions
from headscope.attention.record import AttentionRecord

TOKENS, PAIRS_AT_ONCE = 64, 16
"""Tokens of a block, and pairs of a program."""


@triton.jit
def _block_moments(
    K, OUT, k_head, k_row, out_block, out_group, first, n_keys,
    F: tl.constexpr, FB: tl.constexpr, BI: tl.constexpr, PAIRS: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sums of x, y, x^2, x y, y^2 and |k| over the keys of each block; that of block 0 starts BI before `first`."""
    block = tl.program_id(0)
    group = tl.program_id(1)
    f = tl.program_id(2) * FB + tl.arange(0, FB)
    one, two = pair_dimensions(f, PAIRS, START, DIM, INTERLEAVED)
    j = first + (block - 1) * BI + tl.arange(0, BI)
    key = K + group.to(tl.int64) * k_head + j[:, None].to(tl.int64) * k_row
    mask = (j >= 0)[:, None] & (j < n_keys)[:, None] & (f < F)[None, :]
    x = tl.load(key + one[None, :], mask=mask, other=0.0).to(tl.float64)
    y = tl.load(key + two[None, :], mask=mask, other=0.0).to(tl.float64)
    x_sum, y_sum = tl.sum(x, 0), tl.sum(y, 0)
    xx_sum, xy_sum, yy_sum = tl.sum(x * x, 0), tl.sum(x * y, 0), tl.sum(y * y, 0)
    norm_sum = tl.sum(tl.sqrt(x * x + y * y), 0)
    out = OUT + block.to(tl.int64) * out_block + group * out_group + f
    tl.store(out, x_sum, mask=f < F)
    tl.store(out + F, y_sum, mask=f < F)
    tl.store(out + 2 * F, xx_sum, mask=f < F)
    tl.store(out + 3 * F, xy_sum, mask=f < F)
    tl.store(out + 4 * F, yy_sum, mask=f < F)
    tl.store(out + 5 * F, norm_sum, mask=f < F)


@triton.jit
def _contract(
    Q, K, BEFORE, OUT, q_head, q_row, k_head, k_row, before_block, before_group, out_block, out_head, first, n_queries,
    GROUP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, BI: tl.constexpr, PAIRS: tl.constexpr,
    START: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Sums over the queries of a block, and the keys up to `first` + query, of the three products."""
    block = tl.program_id(0)
    group = tl.program_id(1)
    f = tl.program_id(2) * FB + tl.arange(0, FB)
    one, two = pair_dimensions(f, PAIRS, START, DIM, INTERLEAVED)
    i = block * BI + tl.arange(0, BI)
    j = i + first
    mask = (i < n_queries)[:, None] & (f < F)[None, :]
    key = K + group.to(tl.int64) * k_head + j[:, None].to(tl.int64) * k_row
    key_mask = mask & (j >= 0)[:, None]
    x = tl.load(key + one[None, :], mask=key_mask, other=0.0).to(tl.float64)
    y = tl.load(key + two[None, :], mask=key_mask, other=0.0).to(tl.float64)
    before = BEFORE + block.to(tl.int64) * before_block + group * before_group + f
    is_pair = f < F
    x_sum = tl.cumsum(x, 0) + tl.load(before, mask=is_pair, other=0.0)[None, :]
    y_sum = tl.cumsum(y, 0) + tl.load(before + F, mask=is_pair, other=0.0)[None, :]
    xx_sum = tl.cumsum(x * x, 0) + tl.load(before + 2 * F, mask=is_pair, other=0.0)[None, :]
    xy_sum = tl.cumsum(x * y, 0) + tl.load(before + 3 * F, mask=is_pair, other=0.0)[None, :]
    yy_sum = tl.cumsum(y * y, 0) + tl.load(before + 4 * F, mask=is_pair, other=0.0)[None, :]
    norm_sum = tl.cumsum(tl.sqrt(x * x + y * y), 0) + tl.load(before + 5 * F, mask=is_pair, other=0.0)[None, :]
    for member in range(GROUP):
        head = (group * GROUP + member).to(tl.int64)
        query = Q + head * q_head + i[:, None].to(tl.int64) * q_row
        a = tl.load(query + one[None, :], mask=mask, other=0.0).to(tl.float64)
        b = tl.load(query + two[None, :], mask=mask, other=0.0).to(tl.float64)
        out = OUT + block.to(tl.int64) * out_block + head * out_head + f
        tl.store(out, tl.sum(a * x_sum + b * y_sum, 0), mask=is_pair)
        tl.store(out + F, tl.sum(a * a * xx_sum + 2 * a * b * xy_sum + b * b * yy_sum, 0), mask=is_pair)
        tl.store(out + 2 * F, tl.sum(tl.sqrt(a * a + b * b) * norm_sum, 0), mask=is_pair)


def pair_moments(record: AttentionRecord, geometry: Geometry) -> Tensor:
    """Sums over all visible (i, j) of q_f . k_f, (q_f . k_f)^2 and |q_f| |k_f|: [3, H, F], float64, unscaled.

    `geometry` is that of the layer.
    """
    q, k = runtime.unit_stride(record.q), runtime.unit_stride(record.k)
    sums = torch.zeros(3, geometry.heads, geometry.all_pairs, dtype=torch.float64, device=q.device)
    for rows, columns in chunk_slices(q.shape[1], k.shape[1], record.chunk_size, record.first_key):
        queries, keys = q[:, rows], k[:, columns]
        first = keys.shape[1] - queries.shape[1]
        sums += _causal_moments(queries, keys, first, geometry)
        if record.window is not None and record.window < keys.shape[1]:
            sums -= _causal_moments(queries, keys, first - record.window, geometry)
    return sums


def _causal_moments(q: Tensor, k: Tensor, first: int, geometry: Geometry) -> Tensor:
    """`pair_moments` where query i sees keys 0 to `first` + i; a query with a negative limit sees none."""
    (_, queries, _), (groups, keys, _) = q.shape, k.shape
    pairs = geometry.all_pairs
    blocks_before, blocks = triton.cdiv(max(first, 0), TOKENS), triton.cdiv(queries, TOKENS)
    moments = torch.empty(blocks_before + blocks, groups, 6, pairs, dtype=torch.float64, device=q.device)
    out = torch.empty(blocks, geometry.heads, 3, pairs, dtype=torch.float64, device=q.device)
    constants = {"F": pairs, "FB": PAIRS_AT_ONCE, "BI": TOKENS, **pair_constants(geometry), "num_warps": 4}
    parts = (groups, triton.cdiv(pairs, PAIRS_AT_ONCE))
    runtime.launch(
        _block_moments, (len(moments), *parts), q.device,
        k, moments, k.stride(0), k.stride(1), *moments.stride()[:2], first - blocks_before * TOKENS, keys, **constants,
    )  # fmt: skip
    before = moments.cumsum(0)[blocks_before:]
    runtime.launch(
        _contract, (blocks, *parts), q.device,
        q, k, before, out, q.stride(0), q.stride(1), k.stride(0), k.stride(1), *before.stride()[:2], *out.stride()[:2],
        first, queries, GROUP=geometry.heads // groups, **constants,
    )  # fmt: skip
    return out.sum(0).transpose(0, 1)
