"""Causal attention and its log-sum-exp in O(L) memory: fused where a kernel serves, in blocks of rows elsewhere.

Knows tensors only. Axes: B batch, H query heads, G key (kv) groups, Lq queries, Lk keys, d head dimension.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROWS_PER_BLOCK = 256
"""Query rows per masked block: memory stays O(ROWS_PER_BLOCK x Lk) where a kernel needs an explicit mask."""


def row_blocks(queries: int, keys: int, window: int | None) -> Iterable[tuple[slice, slice, Tensor]]:
    """Cut causal attention into blocks of query rows: (rows, keys that any of them sees, mask [rows, keys]).

    Queries are the last of the keys. Serves windows and cached prefixes without a dense L x L mask.
    """
    first = keys - queries
    for start in range(0, queries, ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, queries)
        low = 0 if window is None else max(0, first + start - window + 1)
        i = torch.arange(first + start, first + stop)[:, None]
        j = torch.arange(low, first + stop)[None]
        seen = j <= i
        yield slice(start, stop), slice(low, first + stop), seen if window is None else seen & (j > i - window)


def fused(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output [B, H, Lq, d] and log-sum-exp of the logits [B, H, Lq] (float32, natural log).

    On CPU both come from one fused kernel; elsewhere the log-sum-exp is computed in blocks of rows.
    """
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        bias = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scaling)
        return out, lse
    allowed = None if seen is None else seen.to(q.device)
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return out, _blocked_lse(q, k, scaling, causal, allowed)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    module: nn.Module | None,
    scale: float,
    window: int | None,
    dropout: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Causal (and windowed) attention of the last Lq of Lk keys: out [B, H, Lq, d] and lse [B, H, Lq] or None.

    `module` is the attention module whose heads these are; None where they are only some of a layer's heads.
    """
    queries, keys = q.shape[2], k.shape[2]
    unwindowed = window is None or window >= keys
    if unwindowed and queries in (1, keys):
        if with_lse:
            return fused(q, k, v, scale, causal=queries > 1)
        if module is None:
            causal = queries > 1
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=True
            )
            return out, None
        # The model's own kernel, so that a seam nobody listens to changes no bit.
        out, _ = sdpa_attention_forward(module, q, k, v, None, dropout=dropout, scaling=scale)
        return out.transpose(1, 2), None
    outs, lses = [], []
    for rows, cols, seen in row_blocks(queries, keys, window):
        out, lse = fused(q[:, :, rows], k[:, :, cols], v[:, :, cols], scale, causal=False, seen=seen)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _blocked_lse(q: Tensor, k: Tensor, scaling: float, causal: bool, seen: Tensor | None) -> Tensor:
    """Log-sum-exp of the logits, [B, H, Lq] float32, in blocks of query rows."""
    batch, heads, queries, _ = q.shape
    groups = k.shape[1]
    lses = []
    for rows, cols, below in row_blocks(queries, k.shape[2], None):
        block = q[:, :, rows].reshape(batch, groups, -1, q.shape[-1])
        kept = k if not causal else k[:, :, cols]
        logits = (block @ kept.transpose(-1, -2)).float().mul_(scaling)
        logits = logits.view(batch, heads, -1, kept.shape[2])
        allowed = below.to(q.device) if causal else None if seen is None else seen[rows]
        if allowed is not None:
            logits.masked_fill_(~allowed, -torch.inf)
        lses.append(logits.logsumexp(-1))
    return torch.cat(lses, 2)
