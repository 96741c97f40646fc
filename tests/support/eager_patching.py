"""Activation patching by hand: eager L x L attention in float64 with the activations of one head replaced."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from headscope.positions.model import Model

NAME = "patched_eager"
Recorded = dict[str, Tensor]
"""z [H, L, dv], q [H, L, d], k [H, L, d], v [H, L, dv] and pattern [H, L, L] of one layer, keys repeated by head."""
_recorded: dict[nn.Module, Recorded] = {}
_replaced: dict[nn.Module, dict[str, tuple[slice, slice, Tensor]]] = {}
_offsets: dict[nn.Module, Tensor] = {}


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    repeats = query.shape[1] // key.shape[1]
    record = {"q": query[0].double()}
    record |= {name: t[0].double().repeat_interleave(repeats, 0) for name, t in (("k", key), ("v", value))}
    _replace(module, record, "q", "k", "v")
    scores = (options.get("scaling") or query.shape[-1] ** -0.5) * (record["q"] @ record["k"].mT)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores + attention_mask[0]
    if options.get("s_aux") is not None:
        sink = options["s_aux"].double()[:, None, None].expand(-1, scores.shape[1], 1)
        record["pattern"] = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        record["pattern"] = scores.softmax(-1)
    _replace(module, record, "pattern")
    record["z"] = record["pattern"] @ record["v"]
    if module in _offsets:
        record["z"] = record["z"] + _offsets[module]
    _replace(module, record, "z")
    _recorded[module] = record
    return record["z"].to(value.dtype).transpose(0, 1)[None].contiguous(), None


def _replace(module: nn.Module, record: Recorded, *names: str) -> None:
    for name in names:
        if name in _replaced.get(module, {}):
            heads, positions, new = _replaced[module][name]
            record[name] = record[name].clone()
            record[name][heads, positions] = new[heads, positions]


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


def run(
    model: Model,
    prompt: Tensor,
    replaced: Mapping[int, dict[str, tuple[slice, slice, Tensor]]] | None = None,
    offsets: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, list[Recorded]]:
    """Logits [L, vocabulary] of a prompt [1, L] and the activations of every attention layer.

    `replaced`: layer -> activation -> (heads, positions, the activation of another run). `offsets` are added to z.
    """
    before = model.module.config._attn_implementation
    modules = model.attention_modules
    _replaced.update({modules[layer]: changes for layer, changes in (replaced or {}).items()})
    _offsets.update({modules[layer]: offset for layer, offset in (offsets or {}).items()})
    model.module.set_attn_implementation(NAME)
    try:
        logits = model.module(prompt, use_cache=False).logits[0]
        return logits, [_recorded[module] for module in modules]
    finally:
        model.module.set_attn_implementation(before)
        for cache in (_replaced, _offsets, _recorded):
            cache.clear()
