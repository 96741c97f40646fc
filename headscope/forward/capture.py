"""Capture: listen to and edit every attention layer of a model while it runs.

    with capturing(model) as layers:
        layers.listen(lambda record: ...)     # called with an AttentionRecord for each layer and sequence
        model.module(input_ids)

If the model was loaded from a TransformerBridge, the attention backend also fires its hooks
`blocks.{l}.attn.hook_rot_q` and `hook_rot_k` ([B, L, heads, d], after rotation). So `run_with_hooks` and
`run_with_cache` work at the speed of the fused kernels, and hooks that edit take effect. `hook_z` and the hooks of the
projections fire as usual, and so do `hook_attn_scores` and `hook_pattern`: a layer with a hook on one of these builds
its L x L pattern and computes its output from it. So give `run_with_cache` a `names_filter` for long texts.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.attention.contexts import refusing_other_threads
from headscope.attention.edits import LayerEdit, TokenSet
from headscope.attention.listeners import Listener
from headscope.attention.streaming_kernel import StreamingKind
from headscope.base.public_functions import checked_methods, public_context
from headscope.base.user_input import check_index, quote
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.bridge_hooks import firing_bridge_hooks
from headscope.models import open_contexts
from headscope.models.bridge import delegating_attention
from headscope.models.checkpoint import LoadedModel
from headscope.models.open_contexts import OpenContext
from headscope.models.padding_check import refusing_wrong_positions
from headscope.streaming import StreamingWindow

_is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)
"""Whether the running passes check the model on a few tokens, so that edits of the user's text need not apply."""


@checked_methods
class CapturedLayers:
    """The attention layers of a captured model, by index; `geometry.layer_numbers` are their numbers in the model."""

    def __init__(self, model: LoadedModel, exit_stack: ExitStack, description: str):
        self._model = model
        self._open_stack: ExitStack | None = exit_stack
        exit_stack.callback(self._close)
        self._description = description
        self._is_editing = False

    def _close(self) -> None:
        self._open_stack = None

    @property
    def _exit_stack(self) -> ExitStack:
        if self._open_stack is None:
            raise BadInput("the capture of these layers has ended. Use them inside its with block")
        return self._open_stack

    def listen(
        self,
        listener: Listener,
        layers: list[int] | None = None,
        needs_row_sums: bool = False,
        key_columns: Tensor | None = None,
    ) -> None:
        """Call `listener(record)` for these layers, by default all, until the capture ends.

        It is called with an AttentionRecord for each layer and each sequence of the batch, in order.
        `needs_row_sums` asks the backend for the sums of every row, `key_columns` [L, n] for weighted sums of numbers
        of the keys (see `backend.listening`). Raises BadInput for unknown layers and for columns of another shape; the
        pass raises it if they have fewer rows than the text has keys.
        """
        if key_columns is not None:
            key_columns = torch.as_tensor(key_columns, dtype=torch.float32, device="cpu")
            if key_columns.ndim != 2:
                shape = tuple(key_columns.shape)
                raise BadInput(f"key_columns has shape {shape}. Pass numbers [L, n] of the L keys of the text")
        if layers is not None and (not layers or len({*layers}) < len(layers)):
            raise BadInput(
                f"layers={quote(layers)} has no layer, or one twice. Name each layer once, or leave layers out"
            )
        for layer in range(len(self._model.attention_modules)) if layers is None else layers:
            listening = backend.listening(self._module(layer), layer, listener, needs_row_sums, key_columns)
            self._exit_stack.enter_context(listening)

    def edit_qkv(self, layer: int, edit: backend.QKVEdit) -> None:
        """Edit q, k and v of one layer before its kernel until the capture ends.

        `edit(q, k, v, position_ids)` returns (q, k, v); q is [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv] and
        position_ids [1 or B, Lq]. The pass raises BadInput if the edit changes a shape, dtype or device, or returns
        values that are not finite.
        """

        module = self._module(layer)
        self._record_editing()
        number = self._model.geometry.layer_numbers[layer]

        def checked(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Any:
            return backend.check_edited(edit, number, (q, k, v), edit(q, k, v, positions))

        self._exit_stack.enter_context(backend.editing_qkv(module, checked))

    def edit_output(self, layer: int, edit: backend.OutputEdit) -> None:
        """Replace the head outputs z of one layer before its o_proj until the capture ends.

        `edit(z, call)` returns z, [B, H, Lq, dv]; `call` is the AttentionCall with the q, k and v that z comes
        from, the `positions` of the queries and, in `variant`, the factor of q . k and the sliding window. The
        pass raises BadInput as for `edit_qkv`.
        """
        module = self._module(layer)
        self._record_editing()
        number = self._model.geometry.layer_numbers[layer]

        def checked(z: Tensor, call: backend.AttentionCall) -> Tensor:
            return backend.check_edited(edit, number, (z,), (edit(z, call),), ("z",))[0]

        self._exit_stack.enter_context(backend.editing_output(module, checked))

    def edit(self, edit: LayerEdit) -> None:
        """Let an edit of heads of one layer act until the capture ends, together with all others that act on it."""
        module, layer = self._module(edit.layer), self._model.geometry.layer_numbers[edit.layer]
        for head in edit.heads:
            check_index(head, self._model.geometry.layer_heads[edit.layer], "head", f" in layer {layer}")
        self._record_editing()
        self._exit_stack.enter_context(backend.editing(module, edit))

    def stream(self, layer: int, kv_groups: Sequence[int], window: StreamingWindow) -> None:
        """Let these KV groups of one layer attend to the first and last tokens only, until the capture ends.

        They do not read the other keys.
        """
        self._module(layer)
        if kv_groups:
            geometry = self._model.geometry
            size, number = geometry.heads_per_group(layer), geometry.layer_numbers[layer]
            for group in kv_groups:
                check_index(group, geometry.layer_kv_groups[layer], "KV group", f" in layer {number}")
            heads = tuple(head for group in kv_groups for head in range(group * size, (group + 1) * size))
            kind = StreamingKind(window.sink, window.recent)
            self.edit(LayerEdit(kind, "logits", heads, TokenSet(), f"{kind.name} of layer {number}", layer=layer))

    def hook(self, module: nn.Module, function: Any) -> None:
        """Call `function(module, args, kwargs, output)` after every forward pass of a module until the capture ends."""
        self._exit_stack.callback(module.register_forward_hook(function, with_kwargs=True).remove)

    def hook_inputs(self, module: nn.Module, function: Any) -> None:
        """Call `function(module, args, kwargs)` before every forward pass of a module until the capture ends."""
        self._exit_stack.callback(module.register_forward_pre_hook(function, with_kwargs=True).remove)

    def _record_editing(self) -> None:
        """Record that the model is in a context that changes it."""
        if not self._is_editing:
            self._is_editing = True
            context = OpenContext(self._description)
            self._exit_stack.enter_context(open_contexts.entered(self._model.module, context))

    def _module(self, layer: int) -> nn.Module:
        modules = self._model.attention_modules
        return modules[check_index(layer, len(modules), "layer", " in the model")]


@public_context
def capturing(model: LoadedModel, description: str = "hs.capturing(...) with edits") -> Iterator[CapturedLayers]:
    """Route the model's attention through headscope's backend and yield its layers; leaving restores the model.

    Only one thread may run the model inside the `with`, so that listeners get no passes of others: a pass in a second
    thread raises BadInput. So does entering it while another thread has a context open on the same model. Other models
    may run in other threads. Contexts may end in any order. Runs that measure the model while layers are edited record
    `description`.
    """
    with ExitStack() as stack:
        stack.enter_context(delegating_attention(model.bridge))
        stack.enter_context(backend.using_backend(model.module))
        check_positions = refusing_wrong_positions(model.padding_check, model.name)
        stack.callback(model.module.register_forward_pre_hook(check_positions, with_kwargs=True).remove)
        stack.enter_context(refusing_other_threads(model.attention_modules, model.name))
        for module in model.attention_modules:
            stack.callback(module.register_forward_pre_hook(_refuse_quantized_cache, with_kwargs=True).remove)
        if model.bridge is not None:
            for block, module in zip(model.bridge.blocks, model.attention_modules, strict=True):
                stack.enter_context(firing_bridge_hooks(block.attn, module))
        yield CapturedLayers(model, stack, description)


def _refuse_quantized_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))  # GPT-NeoX's name
    layers = getattr(cache, "layers", ())
    if any("Quantized" in type(layer).__name__ for layer in layers):
        raise UnsupportedModel(
            "a quantized KV cache changes the keys that are measured. Use a cache without quantization"
        )


def is_trial_pass() -> bool:
    """Whether the running pass checks the model on a few tokens and is not a pass over the user's text."""
    return _is_trial.get()


@contextmanager
def trial_pass() -> Iterator[None]:
    """Mark the passes inside as trials."""
    token = _is_trial.set(True)
    try:
        yield
    finally:
        _is_trial.reset(token)
