"""The backbone of a model: its decoder layers, and checks of its input tokens and its output."""

from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import BadInput
from headscope.models.checkpoint import LoadedModel


def backbone(model: LoadedModel) -> Any:
    """The part of the model that computes hidden states, without the head that predicts tokens from them."""
    base = model.module.base_model
    return base if base is not model.module else getattr(model.module, "model", base)


def decoder_layers(model: LoadedModel) -> list[nn.Module]:
    """The modules that the backbone runs in sequence, with one attention module inside or, in hybrid models, none.

    Empty if the layers are not one `ModuleList`.
    """
    for stack in backbone(model).modules():
        if isinstance(stack, nn.ModuleList):
            counts = [sum(inner in model.attention_modules for inner in layer.modules()) for layer in stack]
            if sum(counts) == len(model.attention_modules) and max(counts) == 1:
                return list(stack)
    return []


def refuse_unknown_tokens(model: LoadedModel, ids: Tensor) -> None:
    """Raise BadInput for tokens without an embedding."""
    n_embeddings = model.module.get_input_embeddings().weight.shape[0]
    largest = int(ids.max())
    if largest >= n_embeddings:
        raise BadInput(
            f"the tokenizer gives token {largest}, but '{model.name}' has {n_embeddings} embeddings. Use the tokenizer "
            "of this model"
        )


def refuse_non_finite(model: LoadedModel, ids: Tensor, values: Tensor) -> None:
    """Raise BadInput if hidden states or logits for ids [1, L] are not finite, naming the first such layer."""
    if values.isfinite().all():
        return
    with torch.no_grad():
        states = backbone(model)(ids, use_cache=False, output_hidden_states=True).hidden_states
    first = next((layer for layer, state in enumerate(states) if not state.isfinite().all()), len(states))
    source = "its embeddings" if first == 0 else f"layer {first - 1}" if first < len(states) else "its last step"
    raise BadInput(
        f"'{model.name}' gives values that are not finite, first from {source}. Check its weights, its adapter and "
        "--dtype"
    )
