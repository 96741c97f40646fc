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
from headscope.attention.call_checks import keys_of_indexer, refuse_unsupported_keywords, refuse_unsupported_mask
from headscope.attention.contexts import entering, with_own_config
from headscope.attention.edited_attention import EditedLayer, attend_with_edits
from headscope.attention.edits import LayerEdit, LayerEdits, LayerInputs
from headscope.attention.kernel import AttentionVariant, append_key_bias, attend
from headscope.attention.listeners import KernelResult, Listener, RegisteredListener, attend_for_listeners
from headscope.attention.masks import (
    QUERY_BIT,
    DecodedMask,
    OpaqueMask,
    encode_mask,
    encode_opaque_mask,
)
from headscope.attention.record import LogitEdit
from headscope.compat.transformers import ATTENTION_IMPLEMENTATION
from headscope.errors import BadInput

BACKEND_NAME = "headscope"
OPAQUE_MASK_BACKEND_NAME = "headscope_opaque_mask"
"""The backend for models that compute with their attention mask: only the mask function differs."""

T = TypeVar("T")
QKVEdit = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv], position_ids [1|B, Lq]) -> edited (q, k, v)."""


def check_edited(
    edit: Callable[..., Any], layer: int, before: Sequence[Tensor], after: Any, names: Sequence[str] = ("q", "k", "v")
) -> tuple[Tensor, ...]:
    """The tensors that a user's edit returned. Raises BadInput if one does not fit the tensor that it replaces.

    It must have the same shape, dtype and device, and finite values where the tensor it replaces has them. `names` are
    the names of the tensors in messages.
    """
    name = getattr(edit, "__name__", type(edit).__name__)
    problem = f"edit '{name}' of layer {layer}"
    if not isinstance(after, Sequence) or len(after) != len(before):
        raise BadInput(f"{problem} must return {len(before)} tensors. Return ({', '.join(names)})")
    for symbol, old, new in zip(names, before, after, strict=True):
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
    """The inputs of one layer's kernel, after edits. `attend` runs it again on other q, k and v, with the same edits.

    q is [B, H, Lq, d], k [B, G, Lk, d] and v [B, G, Lk, dv], after position embeddings; the keys begin at token
    `first_key`. `variant` has the factor of q . k, and the window, chunk size, soft cap and sink, which are None
    where a layer has none. `layer` is the index of the attention layer.
    `positions` [1|B, Lq] are those of the queries for the model, which may count padding; `unpadded_positions` do not,
    and are None without padding. `logit_edits` are the edits of the logits, with masks
    [B, H, Lq]. `kv_groups` is the number of the model's KV groups, which that of k exceeds under edits of the keys of
    single heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    variant: AttentionVariant
    first_key: int = 0
    unpadded_positions: Tensor | None = None
    layer: int = 0
    logit_edits: Sequence[LogitEdit] = ()
    kv_groups: int | None = None
    rerun: Callable[[Sequence[LayerEdit], Tensor], Tensor] | None = None

    def outputs_with(self, edits: Sequence[LayerEdit], z: Tensor) -> Tensor:
        """Head outputs [B, H, Lq, dv] that the layer passes to o_proj with further edits; z are those without them.

        They are computed from the unedited inputs, so that edits act in their stages.
        """
        assert self.rerun is not None
        return self.rerun(edits, z)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Head outputs z [B, H, Lq, dv] for q, k and v of the call's shapes."""
        if not self.logit_edits:
            return attend(q, k, v, None, self.variant, 0.0, False, self.first_key)[0]
        return attend_with_edits(replace(self.edited_layer, q=q, k=k, v=v))[0]

    @property
    def edited_layer(self) -> EditedLayer:
        """The call as what `attend_with_edits` takes."""
        groups = self.k.shape[1] if self.kv_groups is None else self.kv_groups
        inputs = self.q, self.k, self.v, self.variant, self.first_key
        return EditedLayer(self.layer, *inputs, self.logit_edits, groups)

    def for_heads(self, heads: slice, kv_groups: slice) -> "AttentionCall":
        """The call restricted to some of the layer's heads and their KV groups."""
        q, k, v = self.q[:, heads], self.k[:, kv_groups], self.v[:, kv_groups]
        edits = [edit.at(slice(None), heads) for edit in self.logit_edits]
        return replace(
            self, q=q, k=k, v=v, variant=self.variant.for_heads(heads), logit_edits=edits, kv_groups=k.shape[1]
        )

    def for_sequences(self, sequences: slice | Tensor) -> "AttentionCall":
        """The call restricted to some sequences of the batch: a slice, or their indices [n], which may repeat."""
        q, k, v = self.q[sequences], self.k[sequences], self.v[sequences]
        positions = self.positions if len(self.positions) == 1 else self.positions[sequences]
        chosen = None if self.variant.chosen is None else self.variant.chosen.for_sequences(sequences)
        own = sequences if isinstance(sequences, slice) else sequences.cpu()
        edits = [edit.at(own) for edit in self.logit_edits]
        variant = replace(self.variant, chosen=chosen)
        return replace(self, q=q, k=k, v=v, positions=positions, variant=variant, logit_edits=edits)


OutputEdit = Callable[[Tensor, AttentionCall], Tensor]
"""(z [B, H, Lq, dv], the call that computed it) -> the z that is passed to o_proj."""


Registered = dict[object, T]
"""What contexts have registered, oldest first. Each context has its own key, since they may end in any order."""


@dataclass
class _ModuleHooks:
    qkv_edits: Registered[QKVEdit] = field(default_factory=dict)
    output_edits: Registered[OutputEdit] = field(default_factory=dict)
    listeners: Registered[RegisteredListener] = field(default_factory=dict)
    edits: Registered[LayerEdit] = field(default_factory=dict)
    pattern_edits: Registered[OutputEdit] = field(default_factory=dict)
    biases: Registered[QKVEdit] = field(default_factory=dict)
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


def editing_pattern(module: nn.Module, edit: OutputEdit) -> AbstractContextManager[None]:
    """Apply `edit`, which may compute head outputs from another attention pattern, before edits of head outputs."""
    return _registering(_hooks_of(module).pattern_edits, edit)


def editing(module: nn.Module, edit: LayerEdit) -> AbstractContextManager[None]:
    """Let an edit act on heads of one attention module, together with all others that are registered."""
    return _registering(_hooks_of(module).edits, edit)


def adding_bias(module: nn.Module, bias: QKVEdit) -> AbstractContextManager[None]:
    """Add dimensions to q and k of one attention module that hold a bias of its keys, after edits of q, k and v."""
    return _registering(_hooks_of(module).biases, bias)


def registered_edits(modules: Iterable[nn.Module]) -> list[LayerEdit]:
    """The edits that act on attention modules now."""
    return [edit for module in modules for edit in _hooks_of(module).edits.values()]


@contextmanager
def suspending_edits(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let no edit that is registered now act on attention modules inside the `with`; further ones do."""
    suspended = [(hooks, hooks.edits) for hooks in map(_hooks_of, modules)]
    try:
        for hooks, _ in suspended:
            hooks.edits = {}
        yield
    finally:
        for hooks, edits in suspended:
            hooks.edits = edits


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
    refuse_unsupported_mask(module, mask, chosen is not None or block_indices is not None)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    variant = AttentionVariant(scale, mask.window, mask.chunk_size, softcap, s_aux, chosen)
    hooks = _hooks_by_module.get(module) or _ModuleHooks()
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
    # The caller's position_ids may count padding, which no query sees.
    unpadded = position_ids
    if unpadded is None or mask.key_roles is not None:
        unpadded = mask.query_positions(query.shape[2], key.shape[2], query.device)
    positions = unpadded if position_ids is None else position_ids
    for edit in [*hooks.qkv_edits.values()]:
        query, key, value = edit(query, key, value, unpadded)
    layer = _LayerPass(module, hooks, variant, dropout)
    if mask.key_roles is None:
        out = layer.run(query, key, value, key_bias, positions, mask.dropped_keys[0])
    else:
        out = _run_without_padding(layer, mask, (query, key, value), key_bias, positions, unpadded)
    return out.transpose(1, 2).contiguous(), None


def _run_without_padding(
    layer: "_LayerPass",
    mask: DecodedMask,
    inputs: tuple[Tensor, Tensor, Tensor],
    key_bias: Tensor | None,
    positions: Tensor,
    unpadded: Tensor,
) -> Tensor:
    """Head outputs [B, H, Lq, dv] of a batch with padding or packed documents, one text at a time; 0 for padding."""
    query, key, value = inputs
    assert mask.key_roles is not None
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    is_query = (mask.key_roles & QUERY_BIT).bool().expand(len(query), -1)
    dropped = mask.dropped_keys if len(mask.dropped_keys) == len(query) else mask.dropped_keys * len(query)
    for text, (row, real) in enumerate(mask.sequences(len(query))):
        rows = real[is_query[row]].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        own = query[row, None, :, rows], key[row, None, :, real], value[row, None, :, real]
        bias = None if key_bias is None else key_bias.expand(len(query), -1, -1)[row, None, :, real]
        own_positions, own_unpadded = (place.expand(len(query), -1)[row, None, rows] for place in (positions, unpadded))
        out[row, :, rows] = layer.run(*own, bias, own_positions, dropped[row], text, own_unpadded)[0]
    return out


@dataclass(frozen=True, eq=False)
class _UneditedInputs:
    """The inputs of a layer's kernel before edits, as in `_LayerPass.run`."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_bias: Tensor | None
    positions: Tensor
    first_key: int
    first_sequence: int
    unpadded_positions: Tensor | None

    @property
    def edit_positions(self) -> Tensor:
        """Positions of the queries without padding, [1|B, Lq]."""
        return self.positions if self.unpadded_positions is None else self.unpadded_positions

    def layer_inputs(self, layer: int) -> LayerInputs:
        """The inputs as edits get them."""
        return LayerInputs(layer, self.q, self.k, self.v, self.edit_positions, self.first_key, self.first_sequence)


@dataclass(frozen=True, eq=False)
class _LayerPass:
    """One layer's attention in one pass: edits in their stages, the kernel, and the listeners."""

    module: nn.Module
    hooks: _ModuleHooks
    variant: AttentionVariant
    dropout: float

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_bias: Tensor | None,
        positions: Tensor,
        first_key: int,
        first_sequence: int = 0,
        unpadded_positions: Tensor | None = None,
    ) -> Tensor:
        """Head outputs [B, H, Lq, dv] of sequences without padding, the first of which has this number in the batch."""
        unedited = _UneditedInputs(q, k, v, key_bias, positions, first_key, first_sequence, unpadded_positions)
        call, plan = self._call(unedited, [*self.hooks.edits.values()])
        listeners = [*self.hooks.listeners.values()]
        result = self._attend(call, listeners)
        z = result.out
        for edit in [*self.hooks.pattern_edits.values()]:
            z = edit(z, call)
        z = z if plan is None else plan.edited_outputs(z)
        for edit in [*self.hooks.output_edits.values()]:
            z = edit(z, call)
        for sequence in range(len(z)) if listeners else ():
            self._notify(call, z, result, sequence, first_sequence)
        return z

    def _call(self, unedited: "_UneditedInputs", edits: Sequence[LayerEdit]) -> tuple[AttentionCall, LayerEdits | None]:
        """The kernel's inputs after stage (a), with the edits of its logits, and all edits of the pass."""
        q, k, v, positions, plan = unedited.q, unedited.k, unedited.v, unedited.edit_positions, None
        if edits:
            plan = LayerEdits(edits, unedited.layer_inputs(edits[0].layer))
            q, k, v = plan.edited_inputs()
        for bias in [*self.hooks.biases.values()]:
            q, k, v = bias(q, k, v, positions)
        if unedited.key_bias is not None:
            q, k = append_key_bias(q, k, unedited.key_bias, self.variant.scaling)

        def rerun(further: Sequence[LayerEdit], z: Tensor) -> Tensor:
            if all(edit.target == "z" for edit in further) and not any(edit.target == "z" for edit in edits):
                return LayerEdits(further, unedited.layer_inputs(further[0].layer)).edited_outputs(z)
            call, plan = self._call(unedited, [*edits, *further])
            assert plan is not None
            return plan.edited_outputs(self._attend(call, ()).out)

        call = AttentionCall(
            q, k, v, unedited.positions, self.variant, unedited.first_key, unedited.unpadded_positions,
            edits[0].layer if edits else 0, plan.logit_edits if plan else (), unedited.k.shape[1], rerun,
        )  # fmt: skip
        return call, plan

    def _attend(self, call: AttentionCall, listeners: Sequence[RegisteredListener]) -> KernelResult:
        module = self.module if call.k.shape[1] == call.kv_groups else None
        if not call.logit_edits:
            return attend_for_listeners(
                call.q, call.k, call.v, module, self.variant, self.dropout, listeners, call.first_key
            )
        out, lse = attend_with_edits(call.edited_layer, module, self.dropout, bool(listeners))
        return KernelResult(out, lse, [None] * len(out), [None] * len(listeners))

    def _notify(self, call: AttentionCall, z: Tensor, result: KernelResult, sequence: int, first_sequence: int) -> None:
        assert result.lse is not None
        record = call.edited_layer.record(sequence, z[sequence], result.lse[sequence])
        record = replace(record, batch_index=first_sequence + sequence, row_sums=result.row_sums[sequence])
        for listener, sums in zip(self.hooks.listeners.copy().values(), result.key_sums, strict=True):
            key_sums = None if sums is None else sums[sequence]
            listener.call(replace(record, layer=listener.layer, key_sums=key_sums))


AttentionInterface.register(BACKEND_NAME, attention_forward)
AttentionMaskInterface.register(BACKEND_NAME, encode_mask)
AttentionInterface.register(OPAQUE_MASK_BACKEND_NAME, attention_forward)
AttentionMaskInterface.register(OPAQUE_MASK_BACKEND_NAME, encode_opaque_mask)
