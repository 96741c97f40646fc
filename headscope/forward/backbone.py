"""Where in a model hidden states are made: its backbone, and the layers that they go through."""

from typing import Any

from torch import nn

from headscope.models.checkpoint import LoadedModel


def backbone(model: LoadedModel) -> Any:
    """The part of the model that makes hidden states, without the head that predicts tokens from them."""
    base = model.module.base_model
    return base if base is not model.module else getattr(model.module, "model", base)


def decoder_layers(model: LoadedModel) -> list[nn.Module]:
    """The modules that the backbone runs one after the other, with one attention module inside or, in hybrid models,
    none; empty where they are not one list."""
    for stack in backbone(model).modules():
        if isinstance(stack, nn.ModuleList):
            held = [sum(inner in model.attention_modules for inner in layer.modules()) for layer in stack]
            if sum(held) == len(model.attention_modules) and max(held) == 1:
                return list(stack)
    return []
