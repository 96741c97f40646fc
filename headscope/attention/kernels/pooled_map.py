"""The sums of a pooled attention map, from q, k and the log-sum-exp that fused attention returned.

A program computes the weights of one head from the queries of one block to the keys of one block, a tile at a time, and
adds their sum to its cell. Nothing of size L x L is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headscope.attention.kernels import runtime
from headscope.attention.kernels.row_sums import LOG2_E, SMALLEST_TILE, _first_visible_key, _tanh
from headscope.attention.record import AttentionRecord

LARGEST_TILE = 64
"""Most queries and keys of a tile."""


@triton.jit
def _pooled_map(
    Q, K, LSE, SUMS, q_head, q_row, k_head, k_row, lse_head, sums_head, sums_row, n_queries, n_keys, first_key,
    block_size, first_block, scale, cap, window, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HIDES: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key_block = tl.program_id(0)
    query_block = first_block + tl.program_id(1)
    head = tl.program_id(2)
    hidden = n_keys - n_queries
    first_row = tl.maximum(query_block * block_size - first_key - hidden, 0)
    stop_row = tl.minimum((query_block + 1) * block_size - first_key - hidden, n_queries)
    low = _first_visible_key(first_row + hidden, first_key, window, chunk, HIDES)
    start_key = tl.maximum(key_block * block_size - first_key, low)
    stop_key = tl.minimum((key_block + 1) * block_size - first_key, stop_row + hidden)
    d = tl.arange(0, DP)
    key_base = K + (head // GROUP).to(tl.int64) * k_head
    total = tl.zeros([BM], tl.float32)
    if start_key < stop_key:
        for row in range(first_row, stop_row, BM):
            rows = row + tl.arange(0, BM)
            own = rows + hidden
            lows = _first_visible_key(own, first_key, window, chunk, HIDES)
            q = tl.load(
                Q + head.to(tl.int64) * q_head + rows[:, None].to(tl.int64) * q_row + d[None, :],
                mask=(d[None, :] < D) & (rows[:, None] < stop_row),
                other=0.0,
            )
            lse = tl.load(LSE + head * lse_head + rows, mask=rows < stop_row, other=0.0) * 1.4426950408889634
            for start in range(start_key, stop_key, BN):
                j = start + tl.arange(0, BN)
                k = tl.load(
                    key_base + j[None, :].to(tl.int64) * k_row + d[:, None],
                    mask=(j[None, :] < stop_key) & (d[:, None] < D),
                    other=0.0,
                )
                s = tl.dot(q, k, input_precision=PRECISION) * scale
                if HAS_CAP:
                    s = _tanh(s) * cap
                is_visible = (j[None, :] <= own[:, None]) & (j[None, :] >= lows[:, None])
                is_visible &= (j[None, :] < stop_key) & (rows[:, None] < stop_row)
                total += tl.sum(tl.where(is_visible, tl.exp2(s - lse[:, None]), 0.0), 1)
        cell = SUMS + head.to(tl.int64) * sums_head + query_block * sums_row + key_block
        tl.store(cell, tl.load(cell) + tl.sum(total, 0))


def add_pooled_map(record: AttentionRecord, sums: Tensor, block_size: int) -> Tensor:
    """Add the weights of the record's queries to `sums` [H, blocks, blocks], float32, by blocks of tokens; return them.

    Every variant of attention is supported, in the precision of `row_sums`.
    """
    q, k, lse = runtime.unit_stride(record.q), runtime.unit_stride(record.k), runtime.unit_stride(record.lse.float())
    (heads, queries, dim), (groups, keys, _) = q.shape, k.shape
    stop = record.first_key + keys
    first_block = (stop - queries) // block_size
    stop_block = triton.cdiv(stop, block_size)
    tile = max(SMALLEST_TILE, min(LARGEST_TILE, triton.next_power_of_2(block_size)))
    narrow = q.dtype == torch.float32 or dim > 128
    runtime.launch(
        _pooled_map, (stop_block, stop_block - first_block, heads), q.device,
        q, k, lse, sums, q.stride(0), q.stride(1), k.stride(0), k.stride(1), lse.stride(0), sums.stride(0),
        sums.stride(1), queries, keys, record.first_key, block_size, first_block,
        record.scaling / record.softcap if record.softcap else record.scaling * LOG2_E,
        (record.softcap or 0.0) * LOG2_E, record.window or 0, record.chunk_size or 0,
        GROUP=heads // groups, D=dim, DP=max(SMALLEST_TILE, triton.next_power_of_2(dim)), BM=tile,
        BN=min(tile, 32) if narrow else tile, HIDES=record.window is not None or record.chunk_size is not None,
        HAS_CAP=record.softcap is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return sums
