"""Find the backbone of a model and its decoder layers."""

from typing import Any

from torch import nn

from headscope.models.checkpoint import LoadedModel


def backbone(model: LoadedModel) -> Any:
    """The part of the model that computes hidden states, without the language-model head."""
    base = model.module.base_model
    return base if base is not model.module else getattr(model.module, "model", base)


def decoder_layers(model: LoadedModel) -> list[nn.Module]:
    """The decoder layers in order, each with one attention module or, in hybrid models, none. Empty if they are not one
    list."""
    for stack in backbone(model).modules():
        if isinstance(stack, nn.ModuleList):
            counts = [sum(inner in model.attention_modules for inner in layer.modules()) for layer in stack]
            if sum(counts) == len(model.attention_modules) and max(counts) == 1:
                return list(stack)
    return []
