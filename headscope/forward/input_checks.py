"""Checks of a forward pass: known tokens and finite values."""

import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.forward.backbone import backbone
from headscope.models.checkpoint import LoadedModel


def refuse_unknown_tokens(model: LoadedModel, ids: Tensor) -> None:
    """Refuse tokens without an embedding, which come from another model's tokenizer."""
    embeddings = model.module.get_input_embeddings().weight.shape[0]
    largest = int(ids.max())
    if largest >= embeddings:
        raise BadInput(
            f"the tokenizer gives token {largest}, but '{model.name}' has {embeddings} embeddings. Use the "
            "tokenizer of "
            "this model"
        )


def refuse_non_finite(model: LoadedModel, ids: Tensor, values: Tensor) -> None:
    """Refuse hidden states or logits of ids [1, L] that are not finite, naming the first layer that gives them."""
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
