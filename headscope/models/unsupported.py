"""Architectures that a checkpoint's config or missing head shows to be unsupported, before it runs."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.errors import BadInput, UnsupportedModel


def refuse_by_config(config: Any, name: str) -> None:
    """Raise UnsupportedModel for an architecture whose attention headscope would measure wrongly."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or []
    reasons = [
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder; headscope measures causal decoders"),
        (
            getattr(text, "use_bidirectional_attention", False) is True or getattr(text, "is_causal", True) is False,
            "it attends in both directions; headscope measures causal decoders",
        ),
        (layer_types and not any(map(has_attention, layer_types)), "it has no softmax attention"),
        (
            any("compressed" in layer_type for layer_type in layer_types),
            "its layers also attend to keys that stand for whole blocks of tokens",
        ),
    ]
    if not getattr(config, "return_dict", True):
        raise UnsupportedModel(
            f"cannot measure '{name}' ({config.model_type}): its config has return_dict false, so its parts return "
            "tuples without names. Set return_dict to true in its config"
        )
    for applies, reason in reasons:
        if applies:
            raise UnsupportedModel(f"cannot measure '{name}' ({config.model_type}): {reason}. Use another model")


def refuse_without_language_head(module: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedModel for a model that predicts no tokens, such as a backbone or a classifier."""
    if not isinstance(getattr(module.get_output_embeddings(), "weight", None), Tensor):
        raise UnsupportedModel(
            f"cannot measure '{name}' ({module.config.model_type}): {type(module).__name__} has no language-model "
            "head. Use a causal language model (AutoModelForCausalLM)"
        )


def has_attention(layer_type: str) -> bool:
    """Whether layers of this type have softmax attention."""
    return layer_type not in ("linear_attention", "conv", "moe", "mamba", "recurrent", "mlp")


def refuse_inference_weights(module: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedModel for weights made in inference mode: nothing would notice that they change."""
    if any(parameter.is_inference() for parameter in module.parameters()):
        raise UnsupportedModel(
            f"the weights of {name} were made inside torch.inference_mode, where torch records neither gradients nor "
            "changes. Load the model outside of it"
        )


def refuse_autocast() -> None:
    """Raise BadInput inside `torch.autocast`: it changes numbers, and runs would record the model's own dtype."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            raise BadInput(
                f"torch.autocast is active ({device}, {dtype}), which changes what is measured. Leave it, or load the "
                "model in another dtype, e.g. dtype='bf16'"
            )
