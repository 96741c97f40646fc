"""Read a long document layer by layer, and each layer in chunks of tokens.

Held are the residual stream, one layer's keys and values, and what one chunk makes; in a full pass it is what a layer
makes of all tokens at once. A layer is run by the model's own forward, in which the other layers hand on what they are
given: masks and positions are the family's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from headscope.forward.backbone import backbone
from headscope.forward.input_checks import refuse_non_finite, refuse_unknown_tokens
from headscope.forward.logits import last_hidden_states, replacing_forward
from headscope.forward.prefix_cache import supports_prefix_cache
from headscope.forward.replay import residual_stream, resumable_layers
from headscope.positions.model import Model

MAX_SINGLE_PASS_TOKENS, TOKENS_PER_CHUNK = {"cpu": 2**14, "cuda": 2**16}, {"cpu": 2**10, "cuda": 2**14}
"""Tokens of the longest document that is read in one pass, and those of a chunk of a longer one."""
TRIAL_TOKENS = 48
"""Tokens that are read both ways before a document is read in chunks."""
RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""What the two may differ by, as a share of the norm: the rounding of many layers."""


def choose_chunk_size(model: Model, ids: Tensor) -> int | None:
    """Tokens of the chunks in which ids [1, L] are to be read; None to read them in one pass.

    That is for documents that are not long, and for models that cannot be read otherwise, as where layers pass on
    more than the residual stream, or positions depend on the length. Ask before anybody listens: it tries.
    """
    device = model.device.type
    if (
        ids.shape[1] <= MAX_SINGLE_PASS_TOKENS.get(device, MAX_SINGLE_PASS_TOKENS["cpu"])
        or not supports_prefix_cache(model)
        or not _chunks_match_single_pass(model, ids[:, :TRIAL_TOKENS])
    ):
        return None
    return TOKENS_PER_CHUNK.get(device, TOKENS_PER_CHUNK["cpu"])


def _chunks_match_single_pass(model: Model, ids: Tensor) -> bool:
    """Whether the model makes the same of ids [1, L] in chunks as in one pass."""
    whole = last_hidden_states(model, ids)
    try:
        found = chunked_hidden_states(model, ids, ids.shape[1] // 3)
    except Exception:  # a family's own code, run as it does not run itself: then one pass is what is left
        return False
    return float((found - whole).norm()) <= RELATIVE_TOLERANCE.get(whole.dtype, 5e-2) * float(whole.norm())


def chunked_hidden_states(model: Model, ids: Tensor, chunk_tokens: int) -> Tensor:
    """`finite_hidden` of ids [1, L], [1, L, D]; whoever listens hears every layer once for each `size` tokens."""
    refuse_unknown_tokens(model, ids)
    layers, length = resumable_layers(model), ids.shape[1]
    keys, alone = _LayerKVCache(length), _SingleLayerRunner(layers)
    cache = Cache(layers=[keys] * len(layers))
    stream: Tensor | None = None
    for layer in layers:
        given = stream
        with alone.running_only(layer):
            for keys.chunk_start in range(0, length, chunk_tokens):
                here = slice(keys.chunk_start, keys.chunk_start + chunk_tokens)
                alone.residual_stream = None if given is None else given[..., here, :]
                made = backbone(model)(ids[:, here], past_key_values=cache, use_cache=True).last_hidden_state
                if layer is not layers[-1]:
                    made = residual_stream(alone.output)
                stream = _write_tokens(made, here, stream, length)
    assert stream is not None
    if not all(bool(part.isfinite().all()) for part in torch.split(stream, chunk_tokens, -2)):
        refuse_non_finite(model, ids, stream)
    return stream


def _write_tokens(part: Tensor, token_slice: slice, buffer: Tensor | None, length: int) -> Tensor:
    """The whole with this part, [.., tokens, D], in its place: a new whole of `length` tokens where it does not fit."""
    if buffer is None or (buffer.shape[:-2], buffer.dtype) != (part.shape[:-2], part.dtype):
        buffer = part.new_empty(*part.shape[:-2], length, part.shape[-1])
    buffer[..., token_slice, :] = part
    return buffer


class _LayerKVCache(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of the layer that runs, of `length` tokens, of which those before `begun` are there."""

    is_sliding = False

    def __init__(self, length: int):
        super().__init__()
        self.length, self.chunk_start = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self.values = key_states.new_empty(0)  # those of the layer before are held no longer
        self.keys = key_states.new_empty(*key_states.shape[:2], self.length, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.length, value_states.shape[-1])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add those of a chunk, and return all there are."""
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
    """The model's layers while one of them runs: on `stream`, or on its own input where that is None."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        self.residual_stream: Tensor | None = None
        self.output: Any = None

    @contextmanager
    def running_only(self, layer: nn.Module) -> Iterator[None]:
        """Let that one run, and keep its output; the others return what they are given, in the form of an output."""
        own = layer.forward

        def run(stream: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.output = own(stream if self.residual_stream is None else self.residual_stream, *args, **kwargs)
            return self.output

        def hand_on(stream: Tensor, *_: Any, **__: Any) -> Any:
            return stream if isinstance(self.output, Tensor) else (stream, *self.output[1:])

        with ExitStack() as stack:
            for each in self.layers:
                stack.enter_context(replacing_forward(each, run if each is layer else hand_on))
            yield
