"""What must hold of a pass before anything that it gives counts: known tokens, finite numbers."""

import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.forward.backbone import backbone
from headscope.models.checkpoint import LoadedModel


def refuse_unknown_tokens(model: LoadedModel, ids: Tensor) -> None:
    """Refuse tokens that the model has no embedding for: the tokenizer is another model's."""
    known = model.module.get_input_embeddings().weight.shape[0]
    largest = int(ids.max())
    if largest >= known:
        raise BadInput(
            f"the tokenizer gives token {largest}, but '{model.name}' has embeddings for {known}: it is not the "
            "tokenizer of this model"
        )


def refuse_non_finite(model: LoadedModel, ids: Tensor, values: Tensor) -> None:
    """Refuse hidden states or logits `found` for ids [1, L] that are not finite, saying in which layer that began."""
    if values.isfinite().all():
        return
    with torch.no_grad():
        states = backbone(model)(ids, use_cache=False, output_hidden_states=True).hidden_states
    first = next((layer for layer, state in enumerate(states) if not state.isfinite().all()), len(states))
    where = "its embeddings" if first == 0 else f"layer {first - 1}" if first < len(states) else "its last step"
    raise BadInput(
        f"'{model.name}' gives numbers that are not finite, first out of {where}: nothing can be measured; check its "
        "weights, its adapter and --dtype"
    )
