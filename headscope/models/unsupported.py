"""Facts of a checkpoint's config that are needed before it runs: unsupported architectures and the native context."""

from typing import Any

from headscope.errors import UnsupportedModel

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Config keys of the context length, in order of precedence."""


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


def has_attention(layer_type: str) -> bool:
    """Whether layers of this type have softmax attention."""
    return layer_type not in ("linear_attention", "conv", "moe", "mamba", "recurrent", "mlp")


def native_context(config: Any) -> int:
    """The context length of the training, in tokens; 0 if the config has none."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    originals = [rope.get("original_max_position_embeddings") for rope in ropes]
    declared = next((length for key in LENGTH_KEYS if (length := getattr(text, key, None))), None)
    lengths = [*originals, getattr(text, "original_max_position_embeddings", None), declared]
    return int(min(filter(None, lengths), default=0))
