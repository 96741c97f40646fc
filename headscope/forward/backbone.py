"""The backbone of a model: its decoder layers, also by themselves, and checks of its input tokens and its output."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.models.checkpoint import LoadedModel

POSITION_TABLES = (".wpe.weight", ".embed_positions", ".embed_positions.weight")
"""Ends of the names of tensors with one row per position of the native context."""


def backbone(model: LoadedModel) -> Any:
    """The part of the model that computes hidden states, without the head that predicts tokens from them."""
    base = model.module.base_model
    return base if base is not model.module else getattr(model.module, "model", base)


def decoder_layers(model: LoadedModel) -> list[nn.Module]:
    """The modules that the backbone runs in sequence, with one attention module inside or, in hybrid models, none.

    Empty if the layers are not one `ModuleList`. A text does not use the cross-attention layers of Mllama, which are
    left out.
    """
    unused = getattr(model.module.config.get_text_config(), "cross_attention_layers", ())
    for stack in backbone(model).modules():
        if isinstance(stack, nn.ModuleList):
            counts = [sum(inner in model.attention_modules for inner in layer.modules()) for layer in stack]
            if sum(counts) == len(model.attention_modules) and max(counts) == 1:
                return [layer for number, layer in enumerate(stack) if number not in unused]
    return []


def check_input_ids(model: LoadedModel, ids: Tensor, first_position: int = 0) -> None:
    """Raise BadInput for tokens without an embedding, and for positions beyond the model's table of positions.

    ids [1, L] are the tokens from `first_position` on.
    """
    n_embeddings = model.module.get_input_embeddings().weight.shape[0]
    largest = int(ids.max())
    if largest >= n_embeddings:
        raise BadInput(
            f"the tokenizer gives token {largest}, but '{model.name}' has {n_embeddings} embeddings. Use the tokenizer "
            "of this model"
        )
    length, limit = first_position + ids.shape[1], model.geometry.native_context
    if 0 < limit < length and any(name.endswith(POSITION_TABLES) for name in _tensor_names(model.module)):
        raise BadInput(
            f"'{model.name}' has a table of {limit:,} positions and cannot read {length:,} tokens. Use shorter contexts"
        )


def _tensor_names(module: nn.Module) -> Iterator[str]:
    return (name for named in (module.named_parameters(), module.named_buffers()) for name, _ in named)


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


def separately_runnable_layers(model: LoadedModel) -> list[nn.Module]:
    """The decoder layers of a model, each of which can run by itself.

    Raises UnsupportedModel if layers share keys or are not one list.
    """
    if shares_keys_across_layers(model):
        raise UnsupportedModel(
            f"cannot run single layers of {model.name}: its last layers share the keys of earlier ones. Use "
            "another model"
        )
    return single_layer_list(model)


def single_layer_list(model: LoadedModel) -> list[nn.Module]:
    """The decoder layers of a model. Raises UnsupportedModel if they are not one list."""
    layers = decoder_layers(model)
    if not layers:
        raise UnsupportedModel(
            f"cannot resume the forward pass of {model.name} at a layer: its decoder layers are not one module "
            "list. Use another model"
        )
    return layers


def attention_layer_indices(model: LoadedModel, layers: Sequence[nn.Module]) -> list[int | None]:
    """The index of the attention layer in each decoder layer, None in a layer without attention."""
    index_of = {module: index for index, module in enumerate(model.attention_modules)}
    return [next((index_of[m] for m in layer.modules() if m in index_of), None) for layer in layers]
