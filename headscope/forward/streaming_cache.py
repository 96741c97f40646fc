"""A KV cache that drops what streaming KV groups do not see, to generate with less memory.

    with streaming_cache(model, {5: [0, 2]}, StreamingWindow(64, 256)) as cache:
        model.module.generate(ids, past_key_values=cache)

Keys are cached after rotation, so dropping some of them leaves the positions of the others unchanged. The groups of one
layer keep different numbers of tokens, but the model needs one tensor: each call gets the keys of one layer with NaN in
the dropped places, which the attention backend never reads. Any other attention function gives NaN, not a wrong token.
In a left-padded batch each row keeps its own first tokens. Beam search reorders the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.forward.prefix_cache import supports_prefix_cache
from headscope.forward.stored_cache import observe_cache
from headscope.positions.model import Model
from headscope.streaming import StreamingWindow


class StreamingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: all tokens of its full KV groups, the first and last tokens of the streaming ones.

    A layer with a window or chunk (`limit` tokens) stores no tokens before it. `full` and `streaming` are pairs (keys,
    values) [B, groups, tokens, d] of what is stored. `padding` [B] is the number of padding tokens before each row, or
    None.
    """

    def __init__(self, streaming_groups: Sequence[int], window: StreamingWindow, limit: int | None = None):
        super().__init__()
        self.window = window
        self.limit = limit
        self.is_sliding = limit is not None  # by which transformers finds the layer whose sizes a mask has
        self._groups = tuple(streaming_groups)
        self._length = 0
        self.full: list[Tensor] = []
        self.streaming: list[Tensor] = []
        self.padding: Tensor | None = None

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
        """Store new keys and values; return those of all tokens up to the last, with NaN where they were dropped.

        Of a layer with a window or chunk, only from the first token on that the first new query sees.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before, self._length = self._length, self._length + key_states.shape[2]
        complete = []
        for index, new in enumerate((key_states, value_states)):
            whole = new.new_full((*new.shape[:2], self._length, new.shape[-1]), torch.nan)
            whole[:, :, before:] = new
            whole[:, ~self._streams, self._first_visible(before) : before] = self.full[index]
            streams = whole[:, self._streams]
            streams.scatter_(2, self._kept_tokens(streams, before), self.streaming[index])
            whole[:, self._streams] = streams
            self.full[index] = whole[:, ~self._streams, self._first_visible(self._length) :]
            self.streaming[index] = streams.gather(2, self._kept_tokens(streams, self._length))
            complete.append(whole[:, :, self._first_visible(before) :])
        return complete[0], complete[1]

    def _first_visible(self, length: int) -> int:
        """The first of `length` tokens that the next query sees."""
        return 0 if self.limit is None else max(0, length - (self.limit - 1))

    def _kept_tokens(self, streams: Tensor, length: int) -> Tensor:
        """The tokens, of the first `length`, that streaming groups keep: those that the next query sees.

        They are an index [B, groups, kept, d] into the tokens of `streams` [B, groups, tokens, d].
        """
        first_visible = self._first_visible(length)
        first_recent = max(first_visible, length - (self.window.recent - 1))
        last_padding = 0 if self.padding is None else int(self.padding.max())
        sink_end = min(self.window.sink, first_recent)
        first_sink = min(max(0, first_visible - last_padding), sink_end)
        sinks = torch.arange(first_sink, sink_end, device=streams.device).expand(len(streams), -1)
        if self.padding is not None:
            sinks = (sinks + self.padding.to(streams.device)[:, None]).clamp(max=length - 1)
        recent = torch.arange(first_recent, length, device=streams.device).expand(len(streams), -1)
        kept = torch.cat((sinks, recent), 1)
        return kept[:, None, :, None].expand(-1, streams.shape[1], -1, streams.shape[-1])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search."""
        for part in (self.full, self.streaming):
            part[:] = [tensor.index_select(0, beam_idx.to(tensor.device)) for tensor in part]

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedModel(
            "assisted generation removes tokens from the cache, and streaming_cache cannot restore those that it "
            "dropped. Generate without an assistant"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first_visible(self._length)
        return self._length + query_length - first, first

    def get_seq_length(self) -> int:
        return self._length

    def get_max_cache_shape(self) -> int:
        return -1

    def get_max_length(self) -> int:
        return -1


class StreamingCache(Cache):  # type: ignore[misc]
    """A cache with a `StreamingLayer` per decoder layer.

    `limits` has the largest number of tokens of every layer, None for all. `stored_bytes` is the measured size of its
    tensors.
    """

    def __init__(
        self, groups_by_layer: Mapping[int, Sequence[int]], limits: Sequence[int | None], window: StreamingWindow
    ):
        super().__init__(
            layers=[
                StreamingLayer(groups_by_layer.get(number, ()), window, limit) for number, limit in enumerate(limits)
            ]
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of the storages of all stored tensors."""
        return sum(part.untyped_storage().nbytes() for layer in self.layers for part in layer.stored)

    def read_padding(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook that reads from the attention mask how many padding tokens are before each row.

        Raises BadInput for padding between or after the tokens of a row.
        """
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return
        padding = (mask == 0).sum(-1)
        is_left = torch.arange(mask.shape[1], device=mask.device) < padding[:, None]
        if not torch.equal(is_left, mask == 0):
            raise BadInput("streaming_cache: padding after the first token of a text. Pad the texts on the left")
        for layer in self.layers:
            layer.padding = padding if bool(padding.any()) else None


@contextmanager
def streaming_cache(
    model: Model, groups_by_layer: Mapping[int, Sequence[int]], window: StreamingWindow
) -> Iterator[StreamingCache]:
    """Let KV groups stream, and yield an empty cache that drops what they do not see. Leaving restores the model.

    `groups_by_layer` are the streaming KV groups by layer number. Raises UnsupportedModel for a model whose cache is
    not one key and value per token, layer and KV group, and BadInput for a layer or KV group that it does not have.
    """
    geometry = model.geometry
    if not supports_prefix_cache(model) or shares_keys_across_layers(model):
        raise UnsupportedModel(
            f"cannot stream KV groups of '{model.name}': its cache does not hold one key and one value per token and "
            "layer. Use another model"
        )
    stored = observe_cache(model)
    counts = dict(zip(geometry.layer_numbers, geometry.layer_kv_groups, strict=True))
    for number, groups in groups_by_layer.items():
        if not {*groups} <= {*range(counts.get(number, 0))}:
            raise BadInput(
                f"layer {number} of '{model.name}' has {counts.get(number, 0)} KV groups, not {max(groups)}. Name KV "
                "groups from 0"
            )
        if groups and not stored[number].has_groups:
            raise UnsupportedModel(
                f"cannot stream KV groups of '{model.name}': layer {number} stores values that all heads share (latent "
                "attention), so no KV group can drop a token of its own. Use a model without latent attention"
            )
    with capturing(model) as layers:
        for layer, number in enumerate(geometry.layer_numbers):
            layers.stream(layer, groups_by_layer.get(number, ()), window)
        layer_count = model.module.config.get_text_config().num_hidden_layers
        cache = StreamingCache(
            groups_by_layer,
            [stored[number].limit if number in stored else None for number in range(layer_count)],
            window,
        )
        layers.hook_inputs(model.module, cache.read_padding)
        yield cache
