"""Decoder layers that can run by themselves, and which of them have attention."""

from collections.abc import Sequence

from torch import nn

from headscope.errors import UnsupportedModel
from headscope.forward.backbone import decoder_layers
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.models.checkpoint import LoadedModel


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
