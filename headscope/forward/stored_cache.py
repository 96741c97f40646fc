"""What the KV cache of transformers stores of every attention layer, observed in a short pass."""

from typing import Any

import torch

from headscope.errors import UnsupportedModel
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.models.padding_check import without_contexts
from headscope.positions.model import Model
from headscope.streaming import LayerCache


@torch.no_grad()
def observe_cache(model: Model) -> dict[int, LayerCache]:
    """What the cache stores, by layer number: observed in a pass over two tokens that no open context sees or changes.

    Raises UnsupportedModel for a cache without keys and values by layer.
    """
    geometry = model.geometry
    with without_contexts(model.module):
        output = model.module(torch.zeros((1, 2), dtype=torch.long, device=model.module.device), use_cache=True)
    stored = getattr(getattr(output, "past_key_values", None), "layers", None)
    if stored is None:
        raise UnsupportedModel(
            f"cannot read the KV cache of '{model.name}': transformers returns none. Use a text decoder with a "
            "cache of keys and values"
        )
    layers = {}
    for number, groups in zip(geometry.layer_numbers, geometry.layer_kv_groups, strict=True):
        layer: Any = stored[number] if number < len(stored) else None
        if not isinstance(getattr(layer, "keys", None), torch.Tensor):
            if not shares_keys_across_layers(model):
                raise UnsupportedModel(
                    f"the cache of '{model.name}' has no keys of layer {number}. Use a model whose attention layers "
                    "all cache keys and values"
                )
            layers[number] = LayerCache(0, None, has_groups=False)
            continue
        limit = layer.sliding_window if layer.is_sliding else None
        values = sum(part.shape[1] * part.shape[-1] for part in (layer.keys, layer.values))
        layers[number] = LayerCache(values, limit, layer.keys.shape[1] == groups)
    return layers
