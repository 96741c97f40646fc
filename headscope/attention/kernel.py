"""Causal attention and its log-sum-exp in O(L) memory: fused where a kernel serves, in blocks of rows elsewhere.

Knows tensors only. Axes: B batch, H query heads, G key (kv) groups, Lq queries, Lk keys, d head dimension, which the
values may have another of.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROWS_PER_BLOCK = 256
"""Query rows per masked block: memory stays O(ROWS_PER_BLOCK x Lk) where a kernel needs an explicit mask."""

SINK_DIMS = 8
"""Dimensions that a sink's key adds to every head; kernels like multiples of 8."""


@dataclass(frozen=True, eq=False)
class Rule:
    """What a layer makes of q . k: logits, which keys are seen, and weights.

    A query sees the last keys, as many as its window has, or those of its own chunk: keys are cut into runs of that
    many, from the sequence's first. `cap` bounds the logits s: cap tanh(s / cap). `sink` [H] are logits that every row
    of a head has beside those of its keys, with a value of 0. None is what most families have.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sink: Tensor | None = None

    def of(self, heads: slice) -> "Rule":
        """The rule for some of the layer's query heads."""
        return self if self.sink is None else replace(self, sink=self.sink[heads])

    def hides(self, keys: int, first_key: int) -> bool:
        """Whether a query may not see every earlier one of these keys, the first of which is key `first_key`."""
        if self.chunk is not None and first_key // self.chunk != (first_key + keys - 1) // self.chunk:
            return True
        return self.window is not None and self.window < keys


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits as the softmax gets them."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def row_blocks(
    queries: int, keys: int, window: int | None, chunk: int | None = None, first_key: int = 0
) -> Iterable[tuple[slice, slice, Tensor]]:
    """Cut causal attention into blocks of query rows: (rows, keys that any of them sees, mask [rows, keys]).

    Queries are the last of the keys, the first of which is number `first_key`. Serves windows, chunks and cached
    prefixes without a dense L x L mask.
    """
    first = keys - queries
    for start in range(0, queries, ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, queries)
        low = 0 if window is None else max(0, first + start - window + 1)
        if chunk is not None:
            low = max(low, (first_key + first + start) // chunk * chunk - first_key)
        i = torch.arange(first + start, first + stop)[:, None]
        j = torch.arange(low, first + stop)[None]
        seen = j <= i
        if window is not None:
            seen = seen & (j > i - window)
        if chunk is not None:
            seen = seen & ((first_key + j) // chunk == (first_key + i) // chunk)
        yield slice(start, stop), slice(low, first + stop), seen


def fused(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output [B, H, Lq, dv] and log-sum-exp of the logits [B, H, Lq] (float32, natural log).

    On CPU both come from one fused kernel; elsewhere the log-sum-exp is computed in blocks of rows.
    """
    return (_fused_on_cpu if q.device.type == "cpu" else _fused_elsewhere)(q, k, v, scaling, causal, seen)


def _fused_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    width = v.shape[-1]
    if width != q.shape[-1]:  # the kernel wants one width; dimensions of 0 change nothing
        widest = max(width, q.shape[-1])
        q, k, v = (nn.functional.pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scaling)
    return out[..., :width], lse


def _fused_elsewhere(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, causal: bool, seen: Tensor | None
) -> tuple[Tensor, Tensor]:
    allowed = None if seen is None else seen.to(q.device)
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, is_causal=causal, scale=scaling, enable_gqa=True
    )
    return out, blocked_lse(q, k, scaling, causal, allowed)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    module: nn.Module | None,
    rule: Rule,
    dropout: float,
    with_lse: bool,
    first_key: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of the last Lq of Lk keys under a rule: out [B, H, Lq, dv] and lse [B, H, Lq] or None.

    `module` is the attention module whose heads these are; None where they are only some of a layer's heads.
    """
    queries, keys = q.shape[2], k.shape[2]
    if queries in (1, keys) and not rule.hides(keys, first_key) and rule.cap is None:
        if with_lse or rule.sink is not None or v.shape[-1] != q.shape[-1]:
            return _weighed(q, k, v, rule, causal=queries > 1)
        if module is None:
            causal = queries > 1
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=causal, scale=rule.scaling, enable_gqa=True
            )
            return out, None
        # The model's own kernel, so that a seam nobody listens to changes no bit.
        out, _ = sdpa_attention_forward(module, q, k, v, None, dropout=dropout, scaling=rule.scaling)
        return out.transpose(1, 2), None
    outs, lses = [], []
    for rows, cols, seen in row_blocks(queries, keys, rule.window, rule.chunk, first_key):
        out, lse = _weighed(q[:, :, rows], k[:, :, cols], v[:, :, cols], rule, causal=False, seen=seen)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _weighed(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`fused`, with the rule's cap or sink."""
    if rule.cap is not None:
        block = (q, k, v, rule, seen)
        if torch.is_grad_enabled():  # else a backward pass would keep the weights of every block
            out, lse = checkpoint(_capped_block, *block, use_reentrant=False)
            return out, lse
        return _capped_block(*block)
    if rule.sink is None:
        return fused(q, k, v, rule.scaling, causal, seen)
    q, k, v = _beside_a_sink(q, k, v, rule.scaling, rule.sink)
    if causal:  # the sink's key is the first, so it gets a query too, whose row is dropped
        out, lse = fused(nn.functional.pad(q, (0, 0, 1, 0)), k, v, rule.scaling, causal)
        return out[:, :, 1:], lse[:, :, 1:]
    return fused(q, k, v, rule.scaling, causal, None if seen is None else nn.functional.pad(seen, (1, 0), value=True))


def _beside_a_sink(q: Tensor, k: Tensor, v: Tensor, scaling: float, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with one key before all others, whose logit is the sink's and whose value is 0.

    That key alone is not 0 in the dimensions that are added. There it is 1 / scaling, in two parts, since bfloat16
    holds 8 bits of it, and every query holds the sink.
    """
    dim = q.shape[-1]
    q, k = (nn.functional.pad(t, (0, SINK_DIMS)) for t in (q, k))
    q[..., dim : dim + 2] = sink.to(q.dtype)[None, :, None, None]
    inverse = 1 / scaling
    rounded = float(torch.tensor(inverse, dtype=k.dtype))
    key = torch.zeros_like(k[:, :, :1])
    key[..., dim], key[..., dim + 1] = rounded, inverse - rounded
    return q, torch.cat((key, k), 2), nn.functional.pad(v, (0, 0, 1, 0))


def _capped_block(q: Tensor, k: Tensor, v: Tensor, rule: Rule, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block of rows whose logits are bounded, which no fused kernel does; float32."""
    grouped = q.float().reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    logits = capped((grouped @ k.float().mT) * rule.scaling, rule.cap).view(*q.shape[:3], -1)
    if seen is not None:
        logits = logits.masked_fill(~seen.to(q.device), -torch.inf)
    weights = logits.softmax(-1).view(*grouped.shape[:3], -1)
    return (weights @ v.float()).view(*q.shape[:3], -1).to(q.dtype), logits.logsumexp(-1)


def blocked_lse(q: Tensor, k: Tensor, scaling: float, causal: bool, seen: Tensor | None) -> Tensor:
    """Log-sum-exp of the logits, [B, H, Lq] float32, in blocks of query rows."""
    batch, heads, queries, _ = q.shape
    groups = k.shape[1]
    lses = []
    for rows, cols, below in row_blocks(queries, k.shape[2], None):
        block = q[:, :, rows].reshape(batch, groups, -1, q.shape[-1])
        kept = k if not causal else k[:, :, cols]
        logits = (block.float() @ kept.float().transpose(-1, -2)).mul_(scaling)  # a rounded logit is off by its bits
        logits = logits.view(batch, heads, -1, kept.shape[2])
        allowed = below.to(q.device) if causal else None if seen is None else seen[rows]
        if allowed is not None:
            logits.masked_fill_(~allowed, -torch.inf)
        lses.append(logits.logsumexp(-1))
    return torch.cat(lses, 2)
