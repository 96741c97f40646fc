"""What a checkpoint's config tells before anything runs: whether it must be refused, and its native context."""

from typing import Any

from headscope.errors import UnsupportedModel

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""What configs call the length that a model was trained for."""


def refuse_by_config(config: Any, name: str) -> None:
    """Refuse, by name, architectures whose attention headscope would measure wrongly."""
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None) or []
    reasons = [
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder; headscope measures causal decoders"),
        (
            getattr(text, "use_bidirectional_attention", False) is True or getattr(text, "is_causal", True) is False,
            "it attends in both directions; headscope measures causal decoders",
        ),
        (
            layer_types and not any(attends(each) for each in layer_types),
            "it has no softmax attention",
        ),
    ]
    for wrong, why in reasons:
        if wrong:
            raise UnsupportedModel(f"cannot measure '{name}' ({config.model_type}): {why}")


def attends(layer_type: str) -> bool:
    """Whether layers of that type have softmax attention."""
    return layer_type not in ("linear_attention", "conv", "moe", "mamba", "recurrent", "mlp")


def native_context(config: Any) -> int:
    """The context length the checkpoint was trained for, in tokens; 0 where its config tells none."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    originals = [r.get("original_max_position_embeddings") for r in ropes]
    told = next((length for name in LENGTHS if (length := getattr(text, name, None))), None)
    known = [*originals, getattr(text, "original_max_position_embeddings", None), told]
    return int(min(filter(None, known), default=0))
