"""A KV cache that drops what streaming KV groups do not see, to generate with less memory.

    with streaming_cache(model, {5: [0, 2]}, StreamingWindow(64, 256)) as cache:
        model.module.generate(ids, past_key_values=cache)

Keys are cached after rotation, so dropping some of them leaves the positions of the others unchanged. The groups of one
layer keep different numbers of tokens, but the model needs one tensor: each call gets the keys of one layer with NaN in
the dropped places, which the attention backend never reads. Any other attention function gives NaN, not a wrong token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headscope.errors import UnsupportedModel
from headscope.forward.capture import capturing
from headscope.forward.prefix_cache import supports_prefix_cache
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.positions.model import Model
from headscope.streaming import StreamingWindow


class StreamingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: all tokens of its full KV groups, the first and last tokens of the streaming ones.

    `full` and `streaming` are pairs (keys, values) [B, groups, tokens, d] of what is stored.
    """

    is_sliding = False

    def __init__(self, streaming_groups: Sequence[int], window: StreamingWindow):
        super().__init__()
        self.window = window
        self._groups = tuple(streaming_groups)
        self._length = 0
        self.full: list[Tensor] = []
        self.streaming: list[Tensor] = []

    @property
    def stored(self) -> list[Tensor]:
        """The tensors that are stored."""
        return [*self.full, *self.streaming]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        streams = torch.zeros(key_states.shape[1], dtype=torch.bool, device=key_states.device)
        streams[list(self._groups)] = True
        self._streams = streams
        new = (key_states[:, :, :0], value_states[:, :, :0])
        self.full, self.streaming = [part[:, ~streams] for part in new], [part[:, streams] for part in new]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those of all tokens up to the last, with NaN where they were dropped."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, self._length = self._length, self._length + key_states.shape[2]
        visible = self._kept_tokens(before).to(key_states.device)
        complete = []
        for index, new in enumerate((key_states, value_states)):
            whole = new.new_full((*new.shape[:2], self._length, new.shape[-1]), torch.nan)
            whole[:, :, before:] = new
            whole[:, ~self._streams, :before] = self.full[index]
            place = self._streams.nonzero()[:, 0]
            whole[:, place[:, None], visible] = self.streaming[index]
            self.full[index] = whole[:, ~self._streams]
            self.streaming[index] = whole[:, place[:, None], self._kept_tokens(self._length).to(new.device)]
            complete.append(whole)
        return complete[0], complete[1]

    def _kept_tokens(self, length: int) -> Tensor:
        """The tokens, of the first `length`, that streaming groups keep: those that the next query sees."""
        first_recent = max(0, length - (self.window.recent - 1))
        return torch.cat((torch.arange(min(self.window.sink, first_recent)), torch.arange(first_recent, length)))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return -1

    def get_max_length(self) -> int:
        return -1


class StreamingCache(Cache):  # type: ignore[misc]
    """A cache with a `StreamingLayer` per decoder layer; `stored_bytes` is the measured size of its tensors."""

    def __init__(self, groups_by_layer: Mapping[int, Sequence[int]], layer_count: int, window: StreamingWindow):
        super().__init__(
            layers=[StreamingLayer(groups_by_layer.get(number, ()), window) for number in range(layer_count)]
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storages of all stored tensors."""
        return sum(part.untyped_storage().nbytes() for layer in self.layers for part in layer.stored)


@contextmanager
def streaming_cache(
    model: Model, groups_by_layer: Mapping[int, Sequence[int]], window: StreamingWindow
) -> Iterator[StreamingCache]:
    """Let KV groups stream, and yield an empty cache that drops what they do not see. Leaving restores the model.

    `groups_by_layer` are the streaming KV groups by layer number. Raises UnsupportedModel for a model whose cache is
    not one key and value per token and layer.
    """
    geometry = model.geometry
    if not supports_prefix_cache(model) or shares_keys_across_layers(model):
        raise UnsupportedModel(
            f"cannot stream KV groups of '{model.name}': its cache does not hold one key and one value per token and "
            "layer. Use another model"
        )
    with capturing(model) as layers:
        for layer, number in enumerate(geometry.layer_numbers):
            layers.stream(layer, groups_by_layer.get(number, ()), window)
        layer_count = model.module.config.get_text_config().num_hidden_layers
        yield StreamingCache(groups_by_layer, layer_count, window)
