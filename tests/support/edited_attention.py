"""A model whose attention is eager, L x L, with the logits of some heads edited by hand, without a fused kernel."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from headscope.positions.model import Model
from support import eager_reference, families

NAME = "edited_eager"
Edit = Callable[[Tensor, Tensor], Tensor]
"""q and k of some heads [n, L, d], float64 -> what is added to q . k [n, L, L]."""
_edits: dict[nn.Module, tuple[slice, Edit]] = {}


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    repeats = query.shape[1] // key.shape[1]
    q, k = query.double(), key.repeat_interleave(repeats, 1).double()
    scores = q @ k.mT
    if module in _edits:
        heads, edit = _edits[module]
        scores[0, heads] += edit(q[0, heads], k[0, heads])
    alpha = (scaling * scores + attention_mask).softmax(-1).to(value.dtype)
    return (alpha @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


@torch.no_grad()
def losses(model: Model, ids: Tensor, edits: Mapping[int, tuple[slice, Edit]]) -> Tensor:
    """Loss of each predicted token of ids [1, L], float64, with the heads of some layers edited."""
    before = model.module.config._attn_implementation
    _edits.update({model.attention_modules[layer]: edit for layer, edit in edits.items()})
    model.module.set_attn_implementation(NAME)
    try:
        logits = model.module(ids, use_cache=False).logits[0, :-1].double()
    finally:
        model.module.set_attn_implementation(before)
        _edits.clear()
    return nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")


def zero(shape: families.Family, first: int, last: int) -> Edit:
    """The part of these pairs of the logit is taken away, pair by pair."""

    def edit(q: Tensor, k: Tensor) -> Tensor:
        return -sum(_part(q[..., plane], k[..., plane]) for plane in _planes(shape, first, last))

    return edit


def unrotate_pairs(shape: families.Family, first: int, last: int, theta: Tensor) -> Edit:
    """The part of these pairs is taken away, and added again with both vectors, as complex numbers, turned back."""

    def edit(q: Tensor, k: Tensor) -> Tensor:
        added = torch.zeros(len(q), q.shape[1], q.shape[1], dtype=torch.float64)
        for pair, plane in enumerate(_planes(shape, first, last), start=first):
            derotation = torch.exp(-1j * theta[pair].double() * torch.arange(q.shape[1]))
            content = [torch.complex(t[..., plane[0]], t[..., plane[1]]) * derotation for t in (q, k)]
            added += (content[0][:, :, None] * content[1].conj()[:, None]).real
            added -= _part(q[..., plane], k[..., plane])
        return added

    return edit


def frequencies(module: nn.Module, layer: int) -> Tensor:
    """Frequencies [P] of a layer, rad/token, as the model itself keeps them."""
    buffers = {name.rpartition(".")[2]: buffer for name, buffer in module.named_buffers()}
    kinds = getattr(module.config, "layer_types", None)
    return buffers.get(f"{kinds[layer]}_inv_freq" if kinds else "inv_freq", buffers.get("inv_freq"))


def _planes(shape: families.Family, first: int, last: int) -> list[tuple[int, int]]:
    return eager_reference.planes(shape.head_dim, shape.rotary_dims, shape.layout, shape.rotary_start)[first : last + 1]


def _part(q: Tensor, k: Tensor) -> Tensor:
    """[n, L, 2] -> [n, L, L]."""
    return (q[:, :, None] * k[:, None]).sum(-1)
