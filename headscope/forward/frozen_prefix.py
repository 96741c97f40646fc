"""Keys and values of the first tokens of texts, computed once and never extended: texts that begin alike share them."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from headscope.forward.prefix_cache import supports_prefix_cache
from headscope.positions.model import Model


class FrozenPrefix:
    """A prefix ids [1, n] of texts, under the position scheme and the contexts that are open. Use it inside them.

    `cache` is what a pass over the tokens after it gets; the pass leaves it unchanged, whatever its batch.
    """

    def __init__(self, model: Model, ids: Tensor):
        self.length = ids.shape[1]
        filled = DynamicCache()  # without the config, sliding layers also keep every key
        with torch.no_grad():
            model.module(ids, past_key_values=filled, use_cache=True, logits_to_keep=1)
        self.cache = Cache(layers=[_FrozenLayer(layer.keys, layer.values) for layer in filled.layers])


def shared_prefix(model: Model, first: Tensor, second: Tensor) -> int:
    """Number of first tokens that two texts [1, L] have in common; 0 if the model's cache cannot hold a prefix."""
    shorter = min(first.shape[1], second.shape[1])
    differ = (first[0, :shorter] != second[0, :shorter]).nonzero()
    return (int(differ[0]) if len(differ) else shorter) if supports_prefix_cache(model) else 0


class _FrozenLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [1, G, n, d] of one layer; `update` returns them with further ones and keeps none."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the layer is filled."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the prefix, followed by those of further tokens."""
        keys, values = (
            torch.cat((old.expand(len(new), -1, -1, -1), new), 2)
            for old, new in ((self.keys, key_states), (self.values, value_states))
        )
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        return -1
