"""The one seam between headscope and a model: an attention function for transformers, beside the mask function.

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

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headscope.attention.kernel import AttentionRule, attend
from headscope.attention.masks import QUERY_BIT, REAL_KEY_BIT, DecodedMask, encode_mask
from headscope.attention.record import AttentionRecord
from headscope.errors import UnsupportedModel

BACKEND_NAME = "headscope"

IGNORED_KEYWORDS = frozenset(
    {"is_causal", "sliding_window", "use_cache", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords of attention functions that change no weight here. The window that counts is the mask's, as in eager."""
REFUSED_KEYWORDS = {
    "indices": "each query attends only to keys that an indexer chose",
    "block_indices": "each query attends only to blocks of keys that an indexer chose",
    "position_bias": "it adds a bias to its attention logits",
    "sinks": "its softmax has a sink that differs by query",
    "cu_seq_lens_q": "its sequences come packed",
    "cache": "its cache is paged",
}
"""Why a keyword is refused."""

T = TypeVar("T")
QKVEdit = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv], position_ids [1|B, Lq]) -> edited (q, k, v)."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What the kernel of one layer was given, edits included; `attend` runs it again on other q, k, v."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    rule: AttentionRule
    first_key: int = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """z [B, H, Lq, dv] for q, k and v of these shapes."""
        return attend(q, k, v, None, self.rule, 0.0, False, self.first_key)[0]

    def for_heads(self, heads: slice, kv_groups: slice) -> "AttentionCall":
        """The call of some of the layer's heads, and of the key groups that are theirs."""
        q, k, v = self.q[:, heads], self.k[:, kv_groups], self.v[:, kv_groups]
        return AttentionCall(q, k, v, self.positions, self.rule.for_heads(heads), self.first_key)


OutputEdit = Callable[[Tensor, AttentionCall], Tensor]
"""(z [B, H, Lq, d], what it was computed from) -> the z that o_proj is to read."""
Listener = Callable[[AttentionRecord], None]


@dataclass
class _ModuleHooks:
    qkv_edits: list[QKVEdit] = field(default_factory=list)
    output_edits: list[OutputEdit] = field(default_factory=list)
    listeners: list[tuple[int, Listener]] = field(default_factory=list)


_hooks_by_module: "WeakKeyDictionary[nn.Module, _ModuleHooks]" = WeakKeyDictionary()
_call_observers: list[Callable[..., None]] = []


def using_backend(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Route the model's attention through the seam; the previous implementation returns on exit."""
    return using_attention_implementation(model, BACKEND_NAME)


@contextmanager
def using_attention_implementation(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let the model attend by one of transformers' implementations; the previous one of each part returns on exit."""
    configs = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    previous = [config._attn_implementation for config in configs]
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(previous[0])
        for config, own in zip(configs, previous, strict=True):  # a whole hands its own on to its parts
            config._attn_implementation = own


def editing_qkv(module: nn.Module, edit: QKVEdit) -> AbstractContextManager[None]:
    """Apply `edit` to every (q, k, v) of one attention module, after the edits that are already there."""
    return _temporarily_appended(_hooks_by_module.setdefault(module, _ModuleHooks()).qkv_edits, edit)


def editing_output(module: nn.Module, edit: OutputEdit) -> AbstractContextManager[None]:
    """Apply `change` to every head output of one attention module, before o_proj and before listeners hear it."""
    return _temporarily_appended(_hooks_by_module.setdefault(module, _ModuleHooks()).output_edits, edit)


def listening(module: nn.Module, layer: int, listener: Listener) -> AbstractContextManager[None]:
    """Call `listener` with what one attention module computed, once for each sequence of a batch.

    `layer` is the index that the module goes by among the model's attention layers.
    """
    return _temporarily_appended(_hooks_by_module.setdefault(module, _ModuleHooks()).listeners, (layer, listener))


def observing_calls(observer: Callable[..., None]) -> AbstractContextManager[None]:
    """Call `witness(module, q, k, v=, scaling=, window=, chunk=, softcap=, s_aux=)` at every call, of any model."""
    return _temporarily_appended(_call_observers, observer)


@contextmanager
def _temporarily_appended(members: list[T], member: T) -> Iterator[None]:
    members.append(member)
    try:
        yield
    finally:
        members.remove(member)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv] -> out [B, Lq, H, dv]."""
    _refuse_unsupported_keywords(module, kwargs)
    seen = DecodedMask.decode(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, seen.window, seen.chunk, softcap, s_aux)
    for witness in _call_observers:
        witness(
            module,
            query,
            key,
            v=value,
            scaling=scale,
            window=seen.window,
            chunk=seen.chunk,
            softcap=softcap,
            s_aux=s_aux,
        )
    taps = _hooks_by_module.get(module) or _ModuleHooks()
    positions = (
        seen.query_positions(query.shape[2], key.shape[2], query.device) if position_ids is None else position_ids
    )
    # Positions that are given may count padding, which nobody sees.
    counted = positions if seen.key_roles is None else seen.query_positions(query.shape[2], key.shape[2], query.device)
    for edit in taps.qkv_edits:
        query, key, value = edit(query, key, value, counted)

    def tell(sequence: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor, lse: Tensor | None, first_key: int) -> None:
        if lse is not None:
            beyond = (first_key, rule.chunk, rule.cap, rule.sink)
            for layer, listener in list(taps.listeners):
                listener(AttentionRecord(layer, sequence, q, k, v, z, lse, scale, rule.window, *beyond))

    def changed(z: Tensor, call: AttentionCall) -> Tensor:
        for change in taps.output_edits:
            z = change(z, call)
        return z

    options = (module, rule, dropout, bool(taps.listeners))
    if seen.key_roles is None:
        first = seen.dropped_keys[0]
        out, lse = attend(query, key, value, *options, first)
        out = changed(out, AttentionCall(query, key, value, positions, rule, first))
        for sequence, (q, k, v, z) in enumerate(zip(query, key, value, out, strict=True)):
            tell(sequence, q, k, v, z, None if lse is None else lse[sequence], first)
        return out.transpose(1, 2).contiguous(), None
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for sequence, (roles, first) in enumerate(zip(seen.key_roles, seen.dropped_keys, strict=True)):
        real, slots = (roles & REAL_KEY_BIT).bool(), (roles & QUERY_BIT).bool()
        rows = real[slots].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        q, k, v = query[sequence, None, :, rows], key[sequence, None, :, real], value[sequence, None, :, real]
        z, lse = attend(q, k, v, *options, first)
        z = changed(z, AttentionCall(q, k, v, positions.expand(len(query), -1)[sequence, None, rows], rule, first))
        out[sequence, :, rows] = z[0]
        tell(sequence, q[0], k[0], v[0], z[0], None if lse is None else lse[0], first)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unsupported_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    """Refuse keywords of a family's attention that may change its weights: nothing is swallowed."""
    for name, value in keywords.items():
        if name == "is_causal" and value is False:
            raise _unsupported_model_error(module, "it attends in both directions")
        if name not in IGNORED_KEYWORDS and value is not None:
            why = REFUSED_KEYWORDS.get(name, f"its attention takes '{name}', which headscope does not know")
            raise _unsupported_model_error(module, why)


def _unsupported_model_error(module: nn.Module, reason: str) -> UnsupportedModel:
    family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return UnsupportedModel(f"cannot measure this {family} model: {reason}")


AttentionInterface.register(BACKEND_NAME, attention_forward)
AttentionMaskInterface.register(BACKEND_NAME, encode_mask)
