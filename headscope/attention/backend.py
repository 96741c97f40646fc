"""Attention backend: the attention function that headscope registers with transformers, and hooks on its calls.

After rotation, QK-norm and cache update, every attention layer passes its q, k and v to `attention_forward`. The edits
registered for that layer change them, the fused kernel computes the output, output edits may replace the outputs of
heads, and listeners get the attention record. No L x L matrix is built, and nothing is kept after the listeners return.
This module does not depend on position schemes, measures or files.

Axes: B batch, H query heads, G KV groups, Lq queries, Lk keys, d head dimension, dv value dimension.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from headscope.attention import families
from headscope.attention.call_checks import (
    keys_of_indexer,
    refuse_unsupported_keywords,
    unsupported_model_error,
)
from headscope.attention.contexts import entering, with_own_config
from headscope.attention.kernel import AttentionVariant, append_key_bias, attend
from headscope.attention.listeners import KernelResult, Listener, RegisteredListener, attend_for_listeners
from headscope.attention.masks import (
    QUERY_BIT,
    REAL_KEY_BIT,
    DecodedMask,
    OpaqueMask,
    encode_mask,
    encode_opaque_mask,
)
from headscope.attention.record import AttentionRecord
from headscope.attention.streaming_kernel import StreamingGroups, attend_partly_streaming, streaming_attention
from headscope.compat.transformers import ATTENTION_IMPLEMENTATION
from headscope.errors import BadInput

BACKEND_NAME = "headscope"
OPAQUE_MASK_BACKEND_NAME = "headscope_opaque_mask"
"""The backend for models that compute with their attention mask: only the mask function differs."""

T = TypeVar("T")
QKVEdit = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv], position_ids [1|B, Lq]) -> edited (q, k, v)."""


def check_edited(edit: Callable[..., Any], layer: int, before: Sequence[Tensor], after: Any) -> tuple[Tensor, ...]:
    """The tensors that a user's edit returned. Raises BadInput if one does not fit the tensor that it replaces.

    It must have the same shape, dtype and device, and finite values where the tensor it replaces has them.
    """
    name = getattr(edit, "__name__", type(edit).__name__)
    problem = f"edit '{name}' of layer {layer}"
    if not isinstance(after, Sequence) or len(after) != len(before):
        raise BadInput(f"{problem} must return {len(before)} tensors. Return (q, k, v)")
    for symbol, old, new in zip("qkv", before, after, strict=True):
        if not isinstance(new, Tensor):
            raise BadInput(f"{problem} returns a {type(new).__name__} for {symbol}. Return a tensor")
        for attribute in ("shape", "dtype", "device"):
            expected, actual = (getattr(tensor, attribute) for tensor in (old, new))
            if actual != expected:
                if attribute == "shape":
                    expected, actual = tuple(expected), tuple(actual)
                raise BadInput(f"{problem} returns {symbol} of {attribute} {actual}. Return {attribute} {expected}")
        if not all_finite(new) and all_finite(old):
            raise BadInput(f"{problem} returns {symbol} with values that are not finite. Return finite values")
    return tuple(after)


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. It waits for the device."""
    return bool(values.isfinite().all())


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The inputs of one layer's kernel, after edits. `attend` runs the kernel again on other q, k and v.

    `positions` [1|B, Lq] are those of the queries for the model, which may count padding; `unpadded_positions` do not,
    and are None without padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    variant: AttentionVariant
    first_key: int = 0
    unpadded_positions: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Head outputs z [B, H, Lq, dv] for q, k and v of the call's shapes."""
        return attend(q, k, v, None, self.variant, 0.0, False, self.first_key)[0]

    def attend_streaming(self, sink: int, recent: int) -> Tensor:
        """Head outputs z [B, H, Lq, dv] if each query sees only the first `sink` and last `recent` keys."""
        return streaming_attention(self.q, self.k, self.v, self.variant, sink, recent, self.first_key)

    def for_heads(self, heads: slice, kv_groups: slice) -> "AttentionCall":
        """The call restricted to some of the layer's heads and their KV groups."""
        q, k, v = self.q[:, heads], self.k[:, kv_groups], self.v[:, kv_groups]
        return replace(self, q=q, k=k, v=v, variant=self.variant.for_heads(heads))

    def for_sequences(self, sequences: slice | Tensor) -> "AttentionCall":
        """The call restricted to some sequences of the batch: a slice, or their indices [n], which may repeat."""
        q, k, v = self.q[sequences], self.k[sequences], self.v[sequences]
        positions = self.positions if len(self.positions) == 1 else self.positions[sequences]
        chosen = None if self.variant.chosen is None else self.variant.chosen.for_sequences(sequences)
        return replace(self, q=q, k=k, v=v, positions=positions, variant=replace(self.variant, chosen=chosen))


OutputEdit = Callable[[Tensor, AttentionCall], Tensor]
"""(z [B, H, Lq, dv], the call that computed it) -> the z that is passed to o_proj."""


Registered = dict[object, T]
"""What contexts have registered, oldest first. Each context has its own key, since they may end in any order."""


@dataclass
class _ModuleHooks:
    qkv_edits: Registered[QKVEdit] = field(default_factory=dict)
    output_edits: Registered[OutputEdit] = field(default_factory=dict)
    listeners: Registered[RegisteredListener] = field(default_factory=dict)
    streaming: Registered[StreamingGroups] = field(default_factory=dict)
    observers: Registered[Callable[..., None]] = field(default_factory=dict)


_hooks_by_module: "WeakKeyDictionary[nn.Module, _ModuleHooks]" = WeakKeyDictionary()


def using_backend(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Route the model's attention through headscope's backend; restore the previous implementation on exit."""
    return using_attention_implementation(model, BACKEND_NAME)


@contextmanager
def using_attention_implementation(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Select one of transformers' attention implementations for the text part; on exit, restore that of every part.

    Vision and audio towers keep theirs, since some support no other one.
    """
    with ExitStack() as stack:
        stack.enter_context(entering(model))
        stack.enter_context(with_own_config(model))
        if implementation == BACKEND_NAME:
            stack.enter_context(families.overriding_attention(model, attention_forward))
            if families.needs_opaque_mask(model):
                implementation = OPAQUE_MASK_BACKEND_NAME
        else:
            stack.enter_context(families.with_own_attention(model))
        if families.has_attention_override(model):
            setattr(model.config, ATTENTION_IMPLEMENTATION.attribute, implementation)
        else:
            model.set_attn_implementation(text_part_attention(model.config, implementation))
        yield


def text_part_attention(config: Any, implementation: str) -> str | dict[str, Any]:
    """The value that selects an attention implementation of transformers for the text part of a config.

    Other parts, such as audio towers, choose one that they support.
    """
    return _attention_by_part(config, implementation) or implementation


def _attention_by_part(config: Any, implementation: str) -> dict[str, Any] | None:
    """`implementation` by sub-configuration; None if the text part is the whole model."""
    text = config.get_text_config()
    for key in config.sub_configs:
        part = getattr(config, key)
        if part is text:
            return {"": implementation, key: implementation}
        if part is not None and (nested := _attention_by_part(part, implementation)):
            return {"": implementation, key: nested}
    return None


def editing_qkv(module: nn.Module, edit: QKVEdit) -> AbstractContextManager[None]:
    """Apply `edit` to every (q, k, v) of one attention module, after the edits already registered."""
    return _registering(_hooks_of(module).qkv_edits, edit)


def editing_output(module: nn.Module, edit: OutputEdit) -> AbstractContextManager[None]:
    """Apply `edit` to the head outputs z of one attention module, before o_proj and before listeners are called."""
    return _registering(_hooks_of(module).output_edits, edit)


@contextmanager
def collecting_outputs(modules: Sequence[nn.Module]) -> Iterator[list[tuple[Tensor, AttentionCall]]]:
    """Collect z and its call from every call of attention modules."""
    calls: list[tuple[Tensor, AttentionCall]] = []

    def collect(z: Tensor, call: AttentionCall) -> Tensor:
        calls.append((z, call))
        return z

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(editing_output(module, collect))
        yield calls


def streaming(module: nn.Module, groups: StreamingGroups) -> AbstractContextManager[None]:
    """Let some KV groups of one attention module stream; the innermost of several contexts decides.

    The keys that they do not see are not read, so the cost falls. Listeners are refused: their log-sum-exp would
    belong to all keys.
    """
    return _registering(_hooks_of(module).streaming, groups)


def has_streaming_groups(module: nn.Module) -> bool:
    """Whether KV groups of an attention module stream."""
    return bool(_hooks_of(module).streaming)


def listening(
    module: nn.Module,
    layer: int,
    listener: Listener,
    needs_row_sums: bool = False,
    key_columns: Tensor | None = None,
) -> AbstractContextManager[None]:
    """Call `listener` with the attention record of one module, once for each sequence of a batch.

    `layer` is the module's index among the model's attention layers. With `needs_row_sums`, the record has the sums of
    every row where the backend computes them together with the output: on CPU, without gradients. With `key_columns`
    [L, n], float32 numbers on the CPU of every key of the text, the record has their weighted sums, under the same
    conditions and in float32, if the listeners of the module have no more distinct columns than a head has dimensions.
    The kernel computes them as further dimensions of the values: a few columns cost a few percent of a pass, and as
    many as a head has dimensions about double the time of attention.
    """
    registered = RegisteredListener(layer, listener, needs_row_sums, key_columns)
    return _registering(_hooks_of(module).listeners, registered)


@contextmanager
def observing_calls(modules: Iterable[nn.Module], observer: Callable[..., None]) -> Iterator[None]:
    """Call `observer(module, q, k, v=, scaling=, ...)` at every call of these modules.

    The other keywords are window, chunk_size, softcap, s_aux and key_bias.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_registering(_hooks_of(module).observers, observer))
        yield


def _hooks_of(module: nn.Module) -> _ModuleHooks:
    return _hooks_by_module.setdefault(module, _ModuleHooks())


@contextmanager
def _registering(registered: Registered[T], value: T) -> Iterator[None]:
    key = object()
    registered[key] = value
    try:
        yield
    finally:
        del registered[key]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | OpaqueMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    key_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv] -> out [B, Lq, H, dv].

    The order of the positional arguments is that of transformers' own registered functions: other libraries, such as
    kvpress, wrap all registered functions and call them in this order.

    `key_bias` [1|B, H, Lk] is added to the logits of each key, as by ALiBi. Edits get q and k without it; output edits
    and listeners get q and k with added dimensions that include it. `indices` [B, Lq, n] and `block_indices`
    [B, G, Lq, n] are the keys and blocks of keys that an indexer chose; queries attend to no others.

    Raises UnsupportedModel for keywords and masks that headscope does not support.
    """
    refuse_unsupported_keywords(module, {**kwargs, "is_causal": is_causal})
    if isinstance(attention_mask, OpaqueMask) and attention_mask.indices is not None:
        indices = attention_mask.indices
    chosen = keys_of_indexer(module, query, key, indices, block_indices)
    mask = DecodedMask.decode(
        attention_mask.encoded_on(query.device) if isinstance(attention_mask, OpaqueMask) else attention_mask
    )
    if any(mask.dropped_keys) and not (mask.window or mask.chunk_size):
        # Moshi: its sliding cache drops keys that its attention sees without a cache.
        reason = (
            "its cache has dropped keys that it attends to without a cache, also in transformers. Pass use_cache=False"
        )
        raise unsupported_model_error(module, reason)
    if mask.key_roles is not None and (chosen is not None or block_indices is not None):
        raise unsupported_model_error(
            module, "its indexer may choose other keys in a padded batch. Pass one sequence at a time"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    variant = AttentionVariant(scale, mask.window, mask.chunk_size, softcap, s_aux, chosen)
    hooks = _hooks_by_module.get(module) or _ModuleHooks()
    listeners, streaming = [*hooks.listeners.values()], [*hooks.streaming.values()]
    for observer in [*hooks.observers.values()]:
        observer(
            module,
            query,
            key,
            v=value,
            scaling=scale,
            window=mask.window,
            chunk_size=mask.chunk_size,
            softcap=softcap,
            s_aux=s_aux,
            key_bias=key_bias,
        )
    positions = (
        mask.query_positions(query.shape[2], key.shape[2], query.device) if position_ids is None else position_ids
    )
    # The caller's position_ids may count padding, which no query sees.
    edit_positions = (
        positions if mask.key_roles is None else mask.query_positions(query.shape[2], key.shape[2], query.device)
    )
    for edit in [*hooks.qkv_edits.values()]:
        query, key, value = edit(query, key, value, edit_positions)
    if key_bias is not None:
        query, key = append_key_bias(query, key, key_bias, scale)

    def notify(
        sequence: int, q: Tensor, k: Tensor, v: Tensor, z: Tensor, result: KernelResult, index: int, first: int
    ) -> None:
        if result.lse is not None:
            optional = (first, variant.chunk_size, variant.softcap, variant.sink, result.row_sums[index])
            for listener, sums in zip(listeners, result.key_sums, strict=True):
                inputs = (listener.layer, sequence, q, k, v, z, result.lse[index], scale, variant.window, *optional)
                own_choice = None if chosen is None else chosen.of_sequence(sequence)
                listener.call(AttentionRecord(*inputs, None if sums is None else sums[index], own_choice))

    def apply_output_edits(z: Tensor, call: AttentionCall) -> Tensor:
        for edit in [*hooks.output_edits.values()]:
            z = edit(z, call)
        return z

    def run_kernel(q: Tensor, k: Tensor, v: Tensor, first_key: int) -> KernelResult:
        if not streaming:
            return attend_for_listeners(q, k, v, module, variant, dropout, listeners, first_key)
        if listeners:
            raise BadInput("streaming KV groups cannot be listened to. Measure the attention without streaming")
        return KernelResult(attend_partly_streaming(q, k, v, variant, streaming[-1], first_key))

    if mask.key_roles is None:
        first = mask.dropped_keys[0]
        result = run_kernel(query, key, value, first)
        out = apply_output_edits(result.out, AttentionCall(query, key, value, positions, variant, first))
        for sequence, (q, k, v, z) in enumerate(zip(query, key, value, out, strict=True)):
            notify(sequence, q, k, v, z, result, sequence, first)
        return out.transpose(1, 2).contiguous(), None
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for sequence, (roles, first) in enumerate(zip(mask.key_roles, mask.dropped_keys, strict=True)):
        real, slots = (roles & REAL_KEY_BIT).bool(), (roles & QUERY_BIT).bool()
        rows = real[slots].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        q, k, v = query[sequence, None, :, rows], key[sequence, None, :, real], value[sequence, None, :, real]
        result = run_kernel(q, k, v, first)
        own, unpadded = (p.expand(len(query), -1)[sequence, None, rows] for p in (positions, edit_positions))
        z = apply_output_edits(result.out, AttentionCall(q, k, v, own, variant, first, unpadded))
        out[sequence, :, rows] = z[0]
        notify(sequence, q[0], k[0], v[0], z[0], result, 0, first)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(BACKEND_NAME, attention_forward)
AttentionMaskInterface.register(BACKEND_NAME, encode_mask)
AttentionInterface.register(OPAQUE_MASK_BACKEND_NAME, attention_forward)
AttentionMaskInterface.register(OPAQUE_MASK_BACKEND_NAME, encode_opaque_mask)
