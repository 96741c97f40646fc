"""Causal attention and its log-sum-exp in O(L) memory: fused where a kernel supports it, otherwise in blocks of rows.

All functions take tensors only. Axes: B batch, H query heads, G KV groups, Lq queries, Lk keys, d head dimension,
dv value dimension.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headscope.attention import cuda
from headscope.attention.chosen_keys import ChosenKeys
from headscope.attention.record import soft_cap
from headscope.compat.torch import cpu_flash_attention
from headscope.errors import UnsupportedModel

ROWS_PER_BLOCK = 256
"""Query rows per masked block: memory stays O(ROWS_PER_BLOCK x Lk) if a kernel needs an explicit mask."""
MAX_CUDA_MASK_ELEMENTS, MAX_CUDA_ROWS_PER_BLOCK = 2**26, 8192
"""Limits of a block on CUDA: elements of its mask, and rows. Large, since launches cost more than memory."""

SINK_EXTRA_DIMS = 8
"""Dimensions that the sink's key adds to every head. Kernels need multiples of 8."""
BIAS_PARTS, BIAS_EXTRA_DIMS = 3, 8
"""Dimensions that hold a key's bias, since bfloat16 keeps a third of the bits of float32; dimensions that are added."""


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """How a layer computes attention weights from q . k: scaling, visible keys, soft cap and sink.

    A query sees the last window keys, or the earlier keys of its own chunk: the sequence is cut into chunks of
    `chunk_size` keys. `softcap` soft-caps the logits s: softcap * tanh(s / softcap). `sink` [H] is a learned logit that
    every row of a head has in addition to those of its keys; its value is 0. `chosen` are the keys that the model's
    indexer lets queries attend to. Most families use none of these (None).
    """

    scaling: float
    window: int | None = None
    chunk_size: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    chosen: ChosenKeys | None = None

    def for_heads(self, heads: slice) -> "AttentionVariant":
        """The variant restricted to some of the layer's query heads."""
        chosen = None if self.chosen is None else self.chosen.for_heads(heads)
        return replace(self, sink=None if self.sink is None else self.sink[heads], chosen=chosen)

    def hides_earlier_keys(self, n_keys: int, first_key: int) -> bool:
        """Whether some query does not see all earlier keys, of `n_keys` keys starting at key number `first_key`."""
        if self.chunk_size is not None and first_key // self.chunk_size != (first_key + n_keys - 1) // self.chunk_size:
            return True
        return self.window is not None and self.window < n_keys


def causal_row_blocks(
    n_queries: int,
    n_keys: int,
    window: int | None,
    chunk_size: int | None = None,
    first_key: int = 0,
    device: torch.device | str = "cpu",
    rows_per_block: int = ROWS_PER_BLOCK,
) -> Iterable[tuple[slice, slice, Tensor]]:
    """Cut causal attention into blocks of query rows: (rows, keys that any of them sees, mask [rows, keys]).

    The queries belong to the last keys; the first key has number `first_key`. Supports windows, chunks and cached
    prefixes without a dense L x L mask. Masks are on `device`.
    """
    first = n_keys - n_queries
    for start in range(0, n_queries, rows_per_block):
        stop = min(start + rows_per_block, n_queries)
        low = 0 if window is None else max(0, first + start - window + 1)
        if chunk_size is not None:
            low = max(low, (first_key + first + start) // chunk_size * chunk_size - first_key)
        i = torch.arange(first + start, first + stop, device=device)[:, None]
        j = torch.arange(low, first + stop, device=device)[None]
        visible = j <= i
        if window is not None:
            visible = visible & (j > i - window)
        if chunk_size is not None:
            visible = visible & ((first_key + j) // chunk_size == (first_key + i) // chunk_size)
        yield slice(start, stop), slice(low, first + stop), visible


def _is_on_cuda(t: Tensor) -> bool:
    return t.device.type == "cuda"


def _cuda_rows_per_block(variant: AttentionVariant, n_keys: int) -> int:
    """Rows per launch on CUDA; ROWS_PER_BLOCK if no kernel supports the variant."""
    if variant.softcap is not None:
        return ROWS_PER_BLOCK
    row_keys = min(filter(None, (n_keys, variant.window, variant.chunk_size)))
    return max(ROWS_PER_BLOCK, min(MAX_CUDA_ROWS_PER_BLOCK, MAX_CUDA_MASK_ELEMENTS // row_keys))


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, is_causal: bool, visible_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention output [B, H, Lq, dv] and log-sum-exp of the logits [B, H, Lq] (float32, natural log).

    `visible_mask` [Lq, Lk] is True where a query sees a key. On CPU and CUDA both results come from one fused kernel
    if one supports the inputs.
    """
    return (_fused_attention_cpu if q.device.type == "cpu" else _fused_attention_non_cpu)(
        q, k, v, scaling, is_causal, visible_mask
    )


def _fused_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, is_causal: bool, visible_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias = None if visible_mask is None else q.new_zeros(visible_mask.shape).masked_fill(~visible_mask, -torch.inf)
    width = v.shape[-1]
    if width != q.shape[-1]:  # the kernel needs equal widths; zeros change nothing
        widest = max(width, q.shape[-1])
        q, k, v = (nn.functional.pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    kernel = cpu_flash_attention()
    if kernel is not None:
        out, lse = kernel(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scaling)
    else:
        with torch.no_grad():  # as the kernel's, this log-sum-exp has no gradient
            _, lse = blockwise_attention(q, k, v[..., :0], scaling, is_causal, visible_mask)
        out = nn.functional.scaled_dot_product_attention(q, k, v, bias, 0.0, is_causal, scale=scaling, enable_gqa=True)
    return out[..., :width], lse


def _fused_attention_non_cpu(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, is_causal: bool, visible_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    result = None
    if _is_on_cuda(q) and visible_mask is not None:
        result = cuda.masked_attention(q, k, v, scaling, visible_mask)
    elif _is_on_cuda(q) and (is_causal or q.shape[2] == 1):
        result = cuda.causal_attention(q, k, v, scaling, None)
    return blockwise_attention(q, k, v, scaling, is_causal, visible_mask) if result is None else result


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    module: nn.Module | None,
    variant: AttentionVariant,
    dropout: float,
    with_lse: bool,
    first_key: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of the last Lq of Lk keys under a variant: out [B, H, Lq, dv] and lse [B, H, Lq] or None.

    `module` is the attention module that owns the heads; None if they are only some of a layer's heads. Raises
    UnsupportedModel for dropout with log-sum-exp, windows, chunks, soft cap, sink or values of another width than keys.
    """
    if variant.chosen is not None:
        if dropout:
            raise UnsupportedModel(f"attention dropout of {dropout:g} is active. Call eval() on the model first")
        return _attend_to_chosen_keys(q, k, v, variant, variant.chosen, first_key)
    queries, keys = q.shape[2], k.shape[2]
    plain = queries in (1, keys) and not variant.hides_earlier_keys(keys, first_key) and variant.softcap is None
    bare = plain and not with_lse and variant.sink is None and v.shape[-1] == q.shape[-1]
    if dropout and not bare:
        raise UnsupportedModel(f"attention dropout of {dropout:g} is active. Call eval() on the model first")
    if _is_on_cuda(q) and not (bare and module is not None):
        result = _maskless_cuda_attention(q, k, v, variant, first_key)
        if result is not None:
            return result
    if plain:
        if not bare:
            return attend_block(q, k, v, variant, is_causal=queries > 1)
        repeats_keys = q.shape[1] == k.shape[1] or hasattr(module, "num_key_value_groups")
        if module is None or not repeats_keys:
            causal = queries > 1
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=causal, scale=variant.scaling, enable_gqa=True
            )
            return out, None
        # The model's own kernel, so that the backend without listeners changes no bit.
        out, _ = sdpa_attention_forward(module, q, k, v, None, dropout=dropout, scaling=variant.scaling)
        return out.transpose(1, 2), None
    on_cpu = q.device.type == "cpu" and not torch.is_grad_enabled()  # the log-sum-exp has no gradient
    if (
        on_cpu
        and queries > ROWS_PER_BLOCK
        and not variant.hides_earlier_keys(keys, first_key)
        and variant.softcap is None
    ):
        return _attend_after_cached_keys(q, k, v, variant)
    outs, lses = [], []
    size = _cuda_rows_per_block(variant, keys) if _is_on_cuda(q) else ROWS_PER_BLOCK
    for rows, cols, visible in causal_row_blocks(
        queries, keys, variant.window, variant.chunk_size, first_key, q.device, size
    ):
        out, lse = attend_block(q[:, :, rows], k[:, :, cols], v[:, :, cols], variant, False, visible)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attend_to_chosen_keys(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, chosen: ChosenKeys, first_key: int
) -> tuple[Tensor, Tensor]:
    """Attention to the keys that an indexer chose, in blocks of rows; each unit of each sequence has its own mask."""
    assert len(chosen.indices) == len(q)
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    per_group, limits = q.shape[1] // k.shape[1], (variant.window, variant.chunk_size, first_key, q.device)
    for rows, columns, visible in causal_row_blocks(q.shape[2], k.shape[2], *limits):
        masks = visible & chosen.by_unit(torch.arange(rows.start, rows.stop, device=q.device), k.shape[2])[..., columns]
        for sequence, unit in product(range(masks.shape[0]), range(masks.shape[1])):
            heads = slice(unit * chosen.heads_per_unit, (unit + 1) * chosen.heads_per_unit)
            groups = slice(heads.start // per_group, heads.stop // per_group)
            own = slice(sequence, sequence + 1)
            part = q[own, heads, rows], k[own, groups, columns], v[own, groups, columns]
            of_unit = replace(variant.for_heads(heads), chosen=None)
            result = attend_block(*part, of_unit, False, masks[sequence, unit])
            out[own, heads, rows], lse[own, heads, rows] = result
    return out, lse


def _maskless_cuda_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, first_key: int
) -> tuple[Tensor, Tensor] | None:
    """Attention by causal kernels without a mask, one launch per chunk; a sink is added afterwards.

    None if no kernel supports the variant, or if a sink needs gradients of the log-sum-exp, which kernels do not have.
    """
    if variant.softcap is not None or (variant.sink is not None and torch.is_grad_enabled()):
        return None
    outs, lses = [], []
    for rows, cols in chunk_slices(q.shape[2], k.shape[2], variant.chunk_size, first_key):
        result = cuda.causal_attention(q[:, :, rows], k[:, :, cols], v[:, :, cols], variant.scaling, variant.window)
        if result is None:
            return None
        outs.append(result[0])
        lses.append(result[1])
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in (outs, lses))
    if variant.sink is None:
        return out, lse
    lse_with_sink = torch.logaddexp(lse, variant.sink.float()[None, :, None])
    return (out * (lse - lse_with_sink).exp()[..., None]).to(out.dtype), lse_with_sink


def chunk_slices(n_queries: int, n_keys: int, chunk_size: int | None, first_key: int) -> Iterable[tuple[slice, slice]]:
    """Slices of the queries of each chunk, and of the chunk's keys up to the last of these queries."""
    first, start = n_keys - n_queries, 0
    while start < n_queries:
        key = first_key + first + start
        low, stop = (
            (0, n_queries)
            if chunk_size is None
            else (key // chunk_size * chunk_size - first_key, start + chunk_size - key % chunk_size)
        )
        stop = min(stop, n_queries)
        yield slice(start, stop), slice(max(low, 0), first + stop)
        start = stop


def _attend_after_cached_keys(q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant) -> tuple[Tensor, Tensor]:
    """Attention of queries after cached keys: to cached keys unmasked, to new keys causal, combined by weight."""
    cached = k.shape[2] - q.shape[2]
    before, lse_before = fused_attention(q, k[:, :, :cached], v[:, :, :cached], variant.scaling, is_causal=False)
    own, lse_own = attend_block(q, k[:, :, cached:], v[:, :, cached:], variant, is_causal=True)
    lse = torch.logaddexp(lse_before, lse_own)
    share_before, share_own = ((part - lse).exp()[..., None] for part in (lse_before, lse_own))
    return (before * share_before + own * share_own).to(q.dtype), lse


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, is_causal: bool, visible_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`fused_attention` with the variant's cap or sink."""
    if variant.softcap is not None:
        return _unfused_attention(q, k, v, variant, visible_mask)
    if variant.sink is None:
        return fused_attention(q, k, v, variant.scaling, is_causal, visible_mask)
    q, k, v = _prepend_sink_key(q, k, v, variant.scaling, variant.sink)
    if is_causal:  # the sink's key comes first, so it needs a query too; that row is dropped
        out, lse = fused_attention(nn.functional.pad(q, (0, 0, 1, 0)), k, v, variant.scaling, is_causal)
        return out[:, :, 1:], lse[:, :, 1:]
    return fused_attention(
        q,
        k,
        v,
        variant.scaling,
        is_causal,
        None if visible_mask is None else nn.functional.pad(visible_mask, (1, 0), value=True),
    )


def _prepend_sink_key(q: Tensor, k: Tensor, v: Tensor, scaling: float, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with one more key before all others; its logit is the sink's and its value is 0.

    Only that key is nonzero in the added dimensions: there it holds 1 / scaling, and every query holds the sink's
    logit. 1 / scaling is split into two parts, since bfloat16 keeps only 8 bits of it.
    """
    dim = q.shape[-1]
    q, k = (nn.functional.pad(t, (0, SINK_EXTRA_DIMS)) for t in (q, k))
    q[..., dim : dim + 2] = sink.to(q.dtype)[None, :, None, None]
    inverse = 1 / scaling
    rounded = float(torch.tensor(inverse, dtype=k.dtype))
    key = torch.zeros_like(k[:, :, :1])
    key[..., dim], key[..., dim + 1] = rounded, inverse - rounded
    return q, torch.cat((key, k), 2), nn.functional.pad(v, (0, 0, 1, 0))


def append_key_bias(q: Tensor, k: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """q and k with added dimensions, so that scaling * q . k includes `bias` [1|B, H, Lk] of each key.

    k holds bias / scaling, split into parts, and q holds 1 for each part. So every reader of q . k includes the bias.
    Raises UnsupportedModel if query heads share keys, since their biases may differ.
    """
    if q.shape[1] != k.shape[1]:
        raise UnsupportedModel(
            "it has grouped-query attention with ALiBi slopes per query head, which headscope does not support. Use "
            "another model"
        )
    return append_dimensions(q, k, bias, torch.ones(1, 1, 1, dtype=torch.bool, device=q.device), scaling)


def append_dimensions(q: Tensor, k: Tensor, bias: Tensor, is_biased: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """q [B, H, Lq, d] and k [B, G, Lk, d] with added dimensions that hold a bias of keys, in some rows.

    `bias` [Lk] or [1|B, G, Lk], `is_biased` bool [1|B, 1|H, 1|Lq]. k holds bias / scaling, split into parts.
    """
    dim = q.shape[-1]
    q, k = (nn.functional.pad(t, (0, BIAS_EXTRA_DIMS)) for t in (q, k))
    q[..., dim : dim + BIAS_PARTS] = is_biased.to(q.dtype)[..., None]
    rest = bias.float() / scaling
    for part in range(dim, dim + BIAS_PARTS):
        rounded = rest.to(k.dtype)
        k[..., part] = rounded
        rest = rest - rounded.float()
    return q, k


def _unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, visible_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a block of rows by plain matrix products, if no fused kernel supports it (soft cap)."""
    block = (q, k, v, variant, visible_mask)
    if torch.is_grad_enabled():  # without it, the backward pass would keep the weights of every block
        out, lse = checkpoint(_unfused_attention_block, *block, use_reentrant=False)
        return out, lse
    return _unfused_attention_block(*block)


def _unfused_attention_block(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, visible_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """At least in float32: rounding errors of logits become relative errors of weights."""
    precise = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(precise).reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    logits = soft_cap((grouped @ k.to(precise).mT) * variant.scaling, variant.softcap).view(*q.shape[:3], -1)
    if visible_mask is not None:
        logits = logits.masked_fill(~visible_mask.to(q.device), -torch.inf)
    weights = logits.softmax(-1).view(*grouped.shape[:3], -1)
    return (weights @ v.to(precise)).view(*q.shape[:3], -1).to(q.dtype), logits.logsumexp(-1).float()


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, is_causal: bool, visible_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result of `fused_attention`, by plain matrix products in blocks of rows."""
    outs, lses = [], []
    for rows, cols, causal_mask in causal_row_blocks(q.shape[2], k.shape[2], None):
        keys = cols if is_causal else slice(None)
        mask = causal_mask if is_causal else None if visible_mask is None else visible_mask[rows]
        out, lse = _unfused_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], AttentionVariant(scaling), mask)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
