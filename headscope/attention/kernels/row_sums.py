"""The sums of `RowSums` in one sweep over the keys, from q, k and the log-sum-exp that fused attention returned.

Nothing of size L x L is stored: a program holds a tile of logits of one head and adds up what each row needs. It costs
about one FlashAttention call. Logits are in base 2.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from headscope.attention.kernels import runtime
from headscope.attention.record import LOCAL_DISTANCE, MASKED_LOGIT, AttentionRecord, RowSums

LOG2_E = math.log2(math.e)
SMALLEST_TILE = 16
"""Fewest rows and dimensions of a matrix product on tensor cores."""


@triton.jit
def _tanh(x):
    """Accurate near 0, where 1 - 2 / (e^2x + 1) cancels; no overflow."""
    z = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1 - z) / (1 + z)
    y = x * x
    near = 1 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885)))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def _first_visible_key(own, first_key, window, chunk, HIDES: tl.constexpr):
    """Index of the first key that queries with these own keys see."""
    low = own * 0
    if HIDES:
        low = tl.where(window > 0, tl.maximum(own - window + 1, 0), low)
        size = tl.maximum(chunk, 1)
        low = tl.where(chunk > 0, tl.maximum((own + first_key) // size * size - first_key, low), low)
    return low


@triton.jit
def _add_tile(
    sums, q, key_base, start, own, low, lse, d, k_row, n_keys, scale, cap,
    D: tl.constexpr, BN: tl.constexpr, LOCAL: tl.constexpr, MASKED_LOGIT: tl.constexpr, MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums after one more tile of keys."""
    largest, mass, squares, entropy, distances, local = sums
    j = start + tl.arange(0, BN)
    k = tl.load(
        key_base + j[None, :].to(tl.int64) * k_row + d[:, None],
        mask=(j[None, :] < n_keys) & (d[:, None] < D),
        other=0.0,
    )
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if HAS_CAP:
        s = _tanh(s) * cap
    s -= lse[:, None]
    distance = own[:, None] - j[None, :]
    if MASKED:
        s = tl.where((distance >= 0) & (j[None, :] >= low[:, None]), s, MASKED_LOGIT)
    p = tl.exp2(s)
    if MASKED:
        local += tl.sum(tl.where(distance < LOCAL, p, 0.0), 1)
    return (
        tl.maximum(largest, tl.max(s, 1)),
        mass + tl.sum(p, 1),
        squares + tl.sum(p * p, 1),
        entropy + tl.sum(p * s, 1),
        distances + tl.sum(p * distance.to(tl.float32), 1),
        local,
    )


@triton.jit
def _row_sums(
    Q, K, LSE, ROWS, OUT, q_head, q_row, k_head, k_row, lse_head, out_sum, out_head, count, n_queries, n_keys,
    first_key, scale, cap, window, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOCAL: tl.constexpr,
    MASKED_LOGIT: tl.constexpr, HAS_ROWS: tl.constexpr, HIDES: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    slot = block * BM + tl.arange(0, BM)
    rows = tl.minimum(slot, count - 1)
    if HAS_ROWS:
        rows = tl.load(ROWS + rows).to(tl.int32)
    own = rows + n_keys - n_queries
    low = _first_visible_key(own, first_key, window, chunk, HIDES)
    d = tl.arange(0, DP)
    q = tl.load(
        Q + head.to(tl.int64) * q_head + rows[:, None].to(tl.int64) * q_row + d[None, :],
        mask=(d[None, :] < D) & (rows[:, None] >= 0),
        other=0.0,
    )
    lse = tl.load(LSE + head * lse_head + rows) * 1.4426950408889634
    key_base = K + (head // GROUP).to(tl.int64) * k_head
    zero = tl.zeros([BM], tl.float32)
    sums = (zero + MASKED_LOGIT, zero, zero, zero, zero, zero)
    begin = tl.min(low) // BN * BN
    stop = tl.max(own) + 1
    # Keys that all rows see and that are local to none need no mask.
    free = tl.minimum((tl.max(low) + BN - 1) // BN * BN, stop)
    last = tl.maximum(free, (tl.min(own) - LOCAL + 1) // BN * BN)
    if HIDES:
        for start in range(begin, free, BN):
            sums = _add_tile(sums, q, key_base, start, own, low, lse, d, k_row, n_keys, scale, cap,
                             D, BN, LOCAL, MASKED_LOGIT, True, HAS_CAP, PRECISION)  # fmt: skip
    for start in range(free, last, BN):
        sums = _add_tile(sums, q, key_base, start, own, low, lse, d, k_row, n_keys, scale, cap,
                         D, BN, LOCAL, MASKED_LOGIT, False, HAS_CAP, PRECISION)  # fmt: skip
    for start in range(last, stop, BN):
        sums = _add_tile(sums, q, key_base, start, own, low, lse, d, k_row, n_keys, scale, cap,
                         D, BN, LOCAL, MASKED_LOGIT, True, HAS_CAP, PRECISION)  # fmt: skip
    largest, mass, squares, entropy, distances, local = sums
    # Recompute the logit of the first key in float32: tiles may have lower precision.
    key = tl.load(key_base + d, mask=d < D, other=0.0).to(tl.float32)
    first = tl.sum(q.to(tl.float32) * key[None, :], 1) * scale
    if HAS_CAP:
        first = _tanh(first) * cap
    first = tl.where((low == 0) & (first_key == 0), tl.exp2(first - lse), 0.0)
    entropy *= 0.6931471805599453
    if HAS_SINK:
        squares /= mass * mass
        distances /= mass
        entropy = entropy / mass - tl.log(mass)
    out = OUT + head.to(tl.int64) * out_head + slot
    is_row = slot < count
    tl.store(out, (largest + lse) * 0.6931471805599453, mask=is_row)
    tl.store(out + out_sum, tl.exp2(largest), mask=is_row)
    tl.store(out + 2 * out_sum, first, mask=is_row)
    tl.store(out + 3 * out_sum, local, mask=is_row)
    tl.store(out + 4 * out_sum, squares, mask=is_row)
    tl.store(out + 5 * out_sum, entropy, mask=is_row)
    tl.store(out + 6 * out_sum, distances, mask=is_row)


def row_sums(record: AttentionRecord, rows: Tensor | None = None) -> RowSums:
    """The sums of query rows, by default of all: `rows` are ascending indices of the record's queries, on its device.

    Every variant of attention is supported. float32 inputs are multiplied in IEEE float32, without TF32; float16 and
    bfloat16 inputs use tensor cores.
    """
    q, k, lse = runtime.unit_stride(record.q), runtime.unit_stride(record.k), runtime.unit_stride(record.lse.float())
    (heads, queries, dim), (groups, keys, _) = q.shape, k.shape
    count = queries if rows is None else len(rows)
    out = torch.empty(7, heads, count, dtype=torch.float32, device=q.device)
    (rows_per_tile, keys_per_tile), warps = _tile_size(dim, q.dtype, samples=rows is not None)
    scale = record.scaling / record.softcap if record.softcap else record.scaling * LOG2_E
    runtime.launch(
        _row_sums, (triton.cdiv(count, rows_per_tile), heads), q.device,
        q, k, lse, lse if rows is None else rows, out, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        lse.stride(0), out.stride(0), out.stride(1), count, queries, keys, record.first_key, scale,
        (record.softcap or 0.0) * LOG2_E, record.window or 0, record.chunk_size or 0,
        GROUP=heads // groups, D=dim, DP=max(SMALLEST_TILE, triton.next_power_of_2(dim)), BM=rows_per_tile,
        BN=keys_per_tile, LOCAL=LOCAL_DISTANCE, MASKED_LOGIT=MASKED_LOGIT, HAS_ROWS=rows is not None,
        HIDES=record.window is not None or record.chunk_size is not None, HAS_CAP=record.softcap is not None,
        HAS_SINK=record.sink is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return RowSums(*out)


def _tile_size(dim: int, dtype: torch.dtype, samples: bool) -> tuple[tuple[int, int], int]:
    """Rows and keys of a tile, and warps: the fastest on an H100 for heads of 64 and 128 dimensions."""
    if samples:
        return (SMALLEST_TILE, 64 if dim <= 128 else 32), 4
    if dtype == torch.float32 or dim > 128:
        return (64, 32), 4
    return ((128, 128), 8) if dim <= 64 else ((64, 64), 4)
