"""The one seam between headscope and a model: an attention function and a mask function for transformers.

After rotation, QK-norm and cache update, every attention layer hands its q, k and v to `attention`. Edits
registered for that layer change them, the fused kernel computes the output, and listeners see what was
computed. Nothing L x L is built and nothing is kept once the listeners return. This file knows nothing
of position schemes, measures or files.

Axes: B batch, H query heads, G key (kv) groups, Lq queries, Lk keys, d head dimension.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headscope.attention import Attention
from headscope.errors import UnsupportedModel

NAME = "headscope"
ROWS_PER_BLOCK = 256
"""Query rows per masked block: memory stays O(ROWS_PER_BLOCK x Lk) where a kernel needs an explicit mask."""

Edit = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, d], position_ids [1|B, Lq]) -> edited (q, k, v)."""


Listener = Callable[[Attention], None]


@dataclass
class _Taps:
    edits: list[Edit] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)


_taps: "WeakKeyDictionary[nn.Module, _Taps]" = WeakKeyDictionary()
_witnesses: list[Callable[..., None]] = []


@contextmanager
def engaged(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention through the seam; the previous implementation returns on exit."""
    previous = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def editing(module: nn.Module, edit: Edit) -> Iterator[None]:
    """Apply `edit` to every (q, k, v) of one attention module, after the edits that are already there."""
    edits = _taps.setdefault(module, _Taps()).edits
    edits.append(edit)
    try:
        yield
    finally:
        edits.remove(edit)


@contextmanager
def listening(module: nn.Module, listener: Listener) -> Iterator[None]:
    """Call `listener` with what one attention module computed, once for each sequence of a batch."""
    listeners = _taps.setdefault(module, _Taps()).listeners
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@contextmanager
def witnessed(witness: Callable[..., None]) -> Iterator[None]:
    """Call `witness(module, q, k, scaling=, window=, **kwargs)` at every attention call, of any model."""
    _witnesses.append(witness)
    try:
        yield
    finally:
        _witnesses.remove(witness)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q [B, H, Lq, d], k and v [B, G, Lk, d] -> out [B, Lq, H, d]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    for witness in _witnesses:
        witness(module, query, key, scaling=scale, window=sliding_window, **kwargs)
    if attention_mask is not None and attention_mask.dtype != torch.uint8:
        raise UnsupportedModel("a custom 4-D attention mask reached the model; pass a 2-D padding mask or none")
    taps = _taps.get(module)
    if taps is not None and taps.edits:
        positions = _positions(query, position_ids)
        for edit in taps.edits:
            query, key, value = edit(query, key, value, positions)
    listeners = taps.listeners if taps is not None else []
    if attention_mask is None:
        out, lse = _attend(module, query, key, value, scale, sliding_window, dropout, with_lse=bool(listeners))
        for sequence in range(len(query)) if listeners else ():
            q, k, v, z = (t[sequence] for t in (query, key, value, out))
            _tell(listeners, module, sequence, q, k, v, z, _given(lse)[sequence], scale, sliding_window, position_ids)
    else:
        out = torch.zeros_like(query[..., : value.shape[-1]])
        for sequence, roles in enumerate(attention_mask[:, 0, 0].expand(len(query), -1)):
            real = (roles & 1).bool()
            slots = (roles & 2).bool()
            rows = real[slots].nonzero()[:, 0]
            if len(rows) == 0:
                continue
            q = query[sequence, None, :, rows]
            k, v = (t[sequence, None, :, real] for t in (key, value))
            z, lse = _attend(module, q, k, v, scale, sliding_window, dropout, with_lse=bool(listeners))
            out[sequence, :, rows] = z[0]
            if listeners:
                _tell(listeners, module, sequence, q[0], k[0], v[0], z[0], _given(lse)[0], scale, sliding_window, None)
    return out.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function, in O(Lk): None for plain causal attention, else roles [B, 1, 1, Lk] uint8.

    Role bit 1: the key is real (not padding, not an empty cache slot). Bit 2: its token is a query of this call.
    The sliding window is left to `attention`, which never needs it as a dense mask.
    """
    if not allow_is_causal_skip and q_length > 1:
        raise UnsupportedModel(
            "packed sequences or a custom mask function reached the model; headscope measures one causal "
            "sequence a row, so pass each document as its own row"
        )
    offset = int(q_offset)
    seen = offset + q_length
    if kv_offset + kv_length == seen and (attention_mask is None or bool(attention_mask.all())):
        return None
    slots = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    real = (slots < seen).expand(batch_size, -1)
    if attention_mask is not None:
        padded = nn.functional.pad(attention_mask, (0, max(0, kv_offset + kv_length - attention_mask.shape[-1])))
        real = real & padded[:, slots].bool()
    queries = (slots >= offset) & (slots < seen)
    return (real.to(torch.uint8) + 2 * queries.to(torch.uint8))[:, None, None]


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


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    dropout: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Causal (and windowed) attention of the last Lq of Lk keys: out [B, H, Lq, d] and lse [B, H, Lq] or None."""
    queries, keys = q.shape[2], k.shape[2]
    unwindowed = window is None or window >= keys
    if unwindowed and queries in (1, keys):
        if with_lse:
            return fused(q, k, v, scale, causal=queries > 1)
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


def _positions(query: Tensor, position_ids: Tensor | None) -> Tensor:
    if position_ids is None:
        return torch.arange(query.shape[2], device=query.device)[None]
    return position_ids


def _given(lse: Tensor | None) -> Tensor:
    assert lse is not None  # listeners are present, so it was asked for
    return lse


def _tell(
    listeners: list[Listener],
    module: Any,
    sequence: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    position_ids: Tensor | None,
) -> None:
    # A sliding cache keeps only the last keys, so key 0 of k may be a later key of the sequence.
    first = 0 if window is None or position_ids is None else max(0, int(position_ids[0, -1]) + 1 - k.shape[1])
    heard = Attention(module.layer_idx, sequence, q, k, v, z, lse, scale, window, first)
    for listener in list(listeners):
        listener(heard)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
