"""Forward pass over a long document layer by layer, and within each layer in chunks of tokens.

Memory holds the residual stream, the keys and values of one layer, and the activations of one chunk; a full pass holds
a layer's activations for all tokens. Each layer runs inside the model's own forward while the other layers pass on
their input, so masks and positions are the family's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from headscope.attention.edits import knowing_prompt_length
from headscope.forward.backbone import (
    attention_layer_indices,
    backbone,
    check_input_ids,
    decoder_layers,
    refuse_non_finite,
    separately_runnable_layers,
)
from headscope.forward.capture import capturing, trial_pass
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.forward.free_memory import fits_one_pass, tokens_per_chunk
from headscope.forward.layer_parts import residual_stream
from headscope.forward.logits import last_hidden_states, replacing_forward
from headscope.forward.prefix_cache import supports_prefix_cache
from headscope.positions.model import Model

TRIAL_TOKENS = 48
"""Tokens that are read in one pass and in chunks, to check that both agree."""
RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference between the two, as a share of the norm: the rounding of many layers."""


def choose_chunk_size(model: Model, ids: Tensor) -> int | None:
    """Tokens per chunk for ids [1, L], or None to read them in one pass.

    None for documents that fit (`fits_one_pass`), and for models that cannot be read in chunks: their layers pass on
    more than the residual stream, or their positions depend on the length. Call it before registering listeners, since
    it runs the model.
    """
    if fits_one_pass(model, ids.shape[1]):
        return None
    with capturing(model):
        if (
            not supports_prefix_cache(model)
            or shares_keys_across_layers(model)
            or None in attention_layer_indices(model, decoder_layers(model))  # their state is not in a KV cache
            or not _chunks_match_single_pass(model, ids[:, :TRIAL_TOKENS])
        ):
            return None
    return tokens_per_chunk(model)


def _chunks_match_single_pass(model: Model, ids: Tensor) -> bool:
    """Whether the model computes the same hidden states for ids [1, L] in chunks as in one pass."""
    with trial_pass():
        expected = last_hidden_states(model, ids)
        try:
            hidden = chunked_hidden_states(model, ids, ids.shape[1] // 3)
        except Exception:  # a family's code may fail if its layers run one at a time
            return False
    return float((hidden - expected).norm()) <= RELATIVE_TOLERANCE.get(expected.dtype, 5e-2) * float(expected.norm())


def chunked_hidden_states(model: Model, ids: Tensor, chunk_tokens: int) -> Tensor:
    """`finite_hidden_states` of ids [1, L], [1, L, D], in chunks of `chunk_tokens`.

    Listeners are called for every layer once per chunk. Raises BadInput for unknown tokens and non-finite states.
    """
    check_input_ids(model, ids)
    layers, length = separately_runnable_layers(model), ids.shape[1]
    layer_cache, runner = _LayerKVCache(length), _SingleLayerRunner(layers)
    cache = Cache(layers=[layer_cache] * len(layers))
    stream: Tensor | None = None
    for layer in layers:
        layer_input = stream
        with runner.running_only(layer), knowing_prompt_length(length):
            for layer_cache.chunk_start in range(0, length, chunk_tokens):
                tokens = slice(layer_cache.chunk_start, layer_cache.chunk_start + chunk_tokens)
                runner.residual_stream = None if layer_input is None else layer_input[..., tokens, :]
                output = backbone(model)(ids[:, tokens], past_key_values=cache, use_cache=True).last_hidden_state
                if layer is not layers[-1]:
                    output = residual_stream(runner.output)
                stream = _write_tokens(output, tokens, stream, length)
    assert stream is not None
    if not bool(torch.stack([part.isfinite().all() for part in torch.split(stream, chunk_tokens, -2)]).all()):
        refuse_non_finite(model, ids, stream)
    return stream


def _write_tokens(part: Tensor, token_slice: slice, buffer: Tensor | None, length: int) -> Tensor:
    """Write a part [.., tokens, D] into the buffer, or into a new one of `length` tokens if shape or dtype differ."""
    if buffer is None or (buffer.shape[:-2], buffer.dtype) != (part.shape[:-2], part.dtype):
        buffer = part.new_empty(*part.shape[:-2], length, part.shape[-1])
    buffer[..., token_slice, :] = part
    return buffer


class _LayerKVCache(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of the running layer for `length` tokens; those before `chunk_start` are filled."""

    is_sliding = False

    def __init__(self, length: int):
        super().__init__()
        self.length, self.chunk_start = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self.values = key_states.new_empty(0)  # frees those of the layer before
        self.keys = key_states.new_empty(*key_states.shape[:2], self.length, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.length, value_states.shape[-1])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values of a chunk; return all up to its end."""
        if not self.chunk_start:
            self.lazy_initialization(key_states, value_states)
        end = self.chunk_start + key_states.shape[2]
        self.keys[:, :, self.chunk_start : end], self.values[:, :, self.chunk_start : end] = key_states, value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.chunk_start + query_length, 0

    def get_seq_length(self) -> int:
        return self.chunk_start

    def get_max_length(self) -> int:
        return -1


class _SingleLayerRunner:
    """Runs one decoder layer at a time, on `residual_stream` or, if that is None, on the layer's own input."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        self.residual_stream: Tensor | None = None
        self.output: Any = None

    @contextmanager
    def running_only(self, layer: nn.Module) -> Iterator[None]:
        """Run only this layer and keep its output; the others return their input in the form of an output."""
        layer_forward = layer.forward

        def run(stream: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.output = layer_forward(
                stream if self.residual_stream is None else self.residual_stream, *args, **kwargs
            )
            return self.output

        def pass_on(stream: Tensor, *_: Any, **__: Any) -> Any:
            return stream if isinstance(self.output, Tensor) else (stream, *self.output[1:])

        with ExitStack() as stack:
            for module in self.layers:
                stack.enter_context(replacing_forward(module, run if module is layer else pass_on))
            yield
