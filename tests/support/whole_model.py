"""The loss of a whole model with a head ablated by a plain hook of torch, to compare with replayed ablations."""

import torch
from torch import Tensor, nn

from headscope.interventions.heads import Unit
from headscope.positions.model import Model


def total_loss(model: Model, ids: Tensor) -> Tensor:
    """Summed loss of the whole model on ids [1, L], in nats."""
    logits = model.module(ids, use_cache=False).logits[0, :-1]
    return nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum")


def output_projection(model: Model, layer: int) -> nn.Module:
    """The matrix that takes the heads' outputs, by the names that transformers gives it."""
    attention = model.attention_modules[layer]
    return next(getattr(attention, name) for name in ("o_proj", "out_proj", "dense") if hasattr(attention, name))


def loss_without_head(model: Model, unit: Unit, ids: Tensor) -> float:
    """The loss of the whole model with a hook of torch that zeroes the head's input to its output projection."""

    def zero_head(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = args[0].unflatten(-1, (model.geometry.layer_heads[unit.layer], -1)).clone()
        heads[..., unit.head, :] = 0
        return (heads.flatten(-2), *args[1:])

    hook = output_projection(model, unit.layer).register_forward_pre_hook(zero_head)
    with torch.no_grad():
        loss = float(total_loss(model, ids))
    hook.remove()
    return loss
