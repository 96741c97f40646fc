"""The one seam between headscope and a model: an attention function and a mask function for transformers.

After rotation, QK-norm and cache update, every attention layer hands its q, k and v to `attention`. Edits
registered for that layer change them, the fused kernel computes the output, changes may replace heads of it,
and listeners see what was computed. Nothing L x L is built and nothing is kept once the listeners return.
This file knows nothing of position schemes, measures or files.

Axes: B batch, H query heads, G key (kv) groups, Lq queries, Lk keys, d head dimension.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headscope.attention.heard import Attention
from headscope.attention.kernel import attend
from headscope.errors import UnsupportedModel

NAME = "headscope"

T = TypeVar("T")
LayerEdit = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, d], position_ids [1|B, Lq]) -> edited (q, k, v)."""


@dataclass(frozen=True, eq=False)
class Call:
    """What the kernel of one layer was given, edits included; `attend` runs it again on other q, k, v.

    `attend` takes any number of query heads, a multiple of the key heads, and returns z [B, heads, Lq, d].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


Change = Callable[[Tensor, Call], Tensor]
"""(z [B, H, Lq, d], what it was computed from) -> the z that o_proj is to read."""
Listener = Callable[[Attention], None]


@dataclass
class _Taps:
    edits: list[LayerEdit] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
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


def editing(module: nn.Module, edit: LayerEdit) -> AbstractContextManager[None]:
    """Apply `edit` to every (q, k, v) of one attention module, after the edits that are already there."""
    return _joined(_taps.setdefault(module, _Taps()).edits, edit)


def changing(module: nn.Module, change: Change) -> AbstractContextManager[None]:
    """Apply `change` to every head output of one attention module, before o_proj and before listeners hear it."""
    return _joined(_taps.setdefault(module, _Taps()).changes, change)


def listening(module: nn.Module, listener: Listener) -> AbstractContextManager[None]:
    """Call `listener` with what one attention module computed, once for each sequence of a batch."""
    return _joined(_taps.setdefault(module, _Taps()).listeners, listener)


def witnessed(witness: Callable[..., None]) -> AbstractContextManager[None]:
    """Call `witness(module, q, k, scaling=, window=, **kwargs)` at every attention call, of any model."""
    return _joined(_witnesses, witness)


@contextmanager
def _joined(members: list[T], member: T) -> Iterator[None]:
    members.append(member)
    try:
        yield
    finally:
        members.remove(member)


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
    taps = _taps.get(module) or _Taps()
    positions = torch.arange(query.shape[2], device=query.device)[None] if position_ids is None else position_ids
    for edit in taps.edits:
        query, key, value = edit(query, key, value, positions)

    def tell(sequence: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor, lse: Tensor | None, first_key: int = 0) -> None:
        if taps.listeners and lse is not None:
            layer: Any = module.layer_idx
            heard = Attention(layer, sequence, q, k, v, z, lse, scale, sliding_window, first_key)
            for listener in list(taps.listeners):
                listener(heard)

    def again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, None, scale, sliding_window, dropout, False)[0]

    def changed(z: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        for change in taps.changes:
            z = change(z, Call(q, k, v, at, again))
        return z

    options = (module, scale, sliding_window, dropout, bool(taps.listeners))
    if attention_mask is None:
        out, lse = attend(query, key, value, *options)
        out = changed(out, query, key, value, positions)
        # A sliding cache keeps only the last keys, so key 0 of k may be a later key of the sequence.
        first = 0 if sliding_window is None else max(0, int(positions[0, -1]) + 1 - key.shape[2])
        for sequence, (q, k, v, z) in enumerate(zip(query, key, value, out, strict=True)):
            tell(sequence, q, k, v, z, None if lse is None else lse[sequence], first)
        return out.transpose(1, 2).contiguous(), None
    out = torch.zeros_like(query[..., : value.shape[-1]])
    for sequence, roles in enumerate(attention_mask[:, 0, 0].expand(len(query), -1)):
        real, slots = (roles & 1).bool(), (roles & 2).bool()
        rows = real[slots].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        q, k, v = query[sequence, None, :, rows], key[sequence, None, :, real], value[sequence, None, :, real]
        z, lse = attend(q, k, v, *options)
        z = changed(z, q, k, v, positions.expand(len(query), -1)[sequence, None, rows])
        out[sequence, :, rows] = z[0]
        tell(sequence, q[0], k[0], v[0], z[0], None if lse is None else lse[0])
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


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
