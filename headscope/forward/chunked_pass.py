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
from headscope.forward.input_checks import refuse_not_finite, refuse_unknown
from headscope.forward.logits import forwarding, last_hidden
from headscope.forward.prefix_cache import continues
from headscope.forward.replay import attention_layers, stream_of
from headscope.positions.model import Model

WHOLE, CHUNK = {"cpu": 2**14, "cuda": 2**16}, {"cpu": 2**10, "cuda": 2**14}
"""Tokens of the longest document that is read in one pass, and those of a chunk of a longer one."""
TRIED = 48
"""Tokens that are read both ways before a document is read in chunks."""
AGREES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""What the two may differ by, as a share of the norm: the rounding of many layers."""


def chunk_size(model: Model, ids: Tensor) -> int | None:
    """Tokens of the chunks in which ids [1, L] are to be read; None to read them in one pass.

    That is for documents that are not long, and for models that cannot be read otherwise, as where layers pass on
    more than the residual stream, or positions depend on the length. Ask before anybody listens: it tries.
    """
    device = model.device.type
    if ids.shape[1] <= WHOLE.get(device, WHOLE["cpu"]) or not continues(model) or not _agrees(model, ids[:, :TRIED]):
        return None
    return CHUNK.get(device, CHUNK["cpu"])


def _agrees(model: Model, ids: Tensor) -> bool:
    """Whether the model makes the same of ids [1, L] in chunks as in one pass."""
    whole = last_hidden(model, ids)
    try:
        found = hidden_in_chunks(model, ids, ids.shape[1] // 3)
    except Exception:  # a family's own code, run as it does not run itself: then one pass is what is left
        return False
    return float((found - whole).norm()) <= AGREES.get(whole.dtype, 5e-2) * float(whole.norm())


def hidden_in_chunks(model: Model, ids: Tensor, size: int) -> Tensor:
    """`finite_hidden` of ids [1, L], [1, L, D]; whoever listens hears every layer once for each `size` tokens."""
    refuse_unknown(model, ids)
    layers, length = attention_layers(model), ids.shape[1]
    keys, alone = _Keys(length), _Alone(layers)
    cache = Cache(layers=[keys] * len(layers))
    stream: Tensor | None = None
    for layer in layers:
        given = stream
        with alone.running(layer):
            for keys.begun in range(0, length, size):
                here = slice(keys.begun, keys.begun + size)
                alone.stream = None if given is None else given[..., here, :]
                made = backbone(model)(ids[:, here], past_key_values=cache, use_cache=True).last_hidden_state
                if layer is not layers[-1]:
                    made = stream_of(alone.output)
                stream = _put(made, here, stream, length)
    assert stream is not None
    if not all(bool(part.isfinite().all()) for part in torch.split(stream, size, -2)):
        refuse_not_finite(model, ids, stream)
    return stream


def _put(part: Tensor, here: slice, whole: Tensor | None, length: int) -> Tensor:
    """The whole with this part, [.., tokens, D], in its place: a new whole of `length` tokens where it does not fit."""
    if whole is None or (whole.shape[:-2], whole.dtype) != (part.shape[:-2], part.dtype):
        whole = part.new_empty(*part.shape[:-2], length, part.shape[-1])
    whole[..., here, :] = part
    return whole


class _Keys(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of the layer that runs, of `length` tokens, of which those before `begun` are there."""

    is_sliding = False

    def __init__(self, length: int):
        super().__init__()
        self.length, self.begun = length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self.values = key_states.new_empty(0)  # those of the layer before are held no longer
        self.keys = key_states.new_empty(*key_states.shape[:2], self.length, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.length, value_states.shape[-1])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add those of a chunk, and return all there are."""
        if not self.begun:
            self.lazy_initialization(key_states, value_states)
        end = self.begun + key_states.shape[2]
        self.keys[:, :, self.begun : end], self.values[:, :, self.begun : end] = key_states, value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.begun + query_length, 0

    def get_seq_length(self) -> int:
        return self.begun

    def get_max_length(self) -> int:
        return -1


class _Alone:
    """The model's layers while one of them runs: on `stream`, or on its own input where that is None."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        self.stream: Tensor | None = None
        self.output: Any = None

    @contextmanager
    def running(self, layer: nn.Module) -> Iterator[None]:
        """Let that one run, and keep its output; the others return what they are given, in the form of an output."""
        own = layer.forward

        def run(stream: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.output = own(stream if self.stream is None else self.stream, *args, **kwargs)
            return self.output

        def hand_on(stream: Tensor, *_: Any, **__: Any) -> Any:
            return stream if isinstance(self.output, Tensor) else (stream, *self.output[1:])

        with ExitStack() as stack:
            for each in self.layers:
                stack.enter_context(forwarding(each, run if each is layer else hand_on))
            yield
