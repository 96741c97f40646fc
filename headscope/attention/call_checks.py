"""Refuse calls of the attention function that headscope would compute wrongly."""

from typing import Any

from torch import Tensor, nn

from headscope.errors import UnsupportedModel

IGNORED_KEYWORDS = frozenset(
    {"is_causal", "sliding_window", "use_cache", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Keywords that do not change attention weights. The window is taken from the mask, as in eager attention."""
UNSUPPORTED_KEYWORDS = {
    "position_bias": "it adds a bias to its attention logits. Use another model",
    "sinks": "its softmax has a sink that differs by query. Use another model",
    "cu_seq_lens_q": "its sequences are packed. Pass one sequence at a time",
    "cache": "its cache is paged. Use a cache that is not",
}
"""Keyword of an attention function -> why headscope cannot measure a model that passes it, and what to do."""


def refuse_unsupported_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    """Raise UnsupportedModel for keywords that may change attention weights and that the backend does not implement."""
    for name, value in keywords.items():
        if name == "is_causal" and value is False:
            raise unsupported_model_error(module, "it attends in both directions. Use another model")
        if name not in IGNORED_KEYWORDS and value is not None:
            unknown = f"its attention takes '{name}', which headscope does not know. Use another model"
            raise unsupported_model_error(module, UNSUPPORTED_KEYWORDS.get(name, unknown))


def refuse_chosen_keys(module: Any, n_keys: int, indices: Tensor | None, block_indices: Tensor | None) -> None:
    """Raise UnsupportedModel if an indexer chose fewer than all of the `n_keys` keys."""
    chosen = n_keys if indices is None else indices.shape[-1]
    if block_indices is not None:
        block_size = getattr(getattr(module, "indexer", None), "block_size", None)
        if block_size is None:
            reason = "each query attends only to blocks of keys that an indexer chose. Use another model"
            raise unsupported_model_error(module, reason)
        chosen = block_indices.shape[-1] * block_size
    if chosen < n_keys:
        raise unsupported_model_error(
            module,
            f"each query attends only to {chosen} keys that an indexer chose. Use texts of at most {chosen} tokens",
        )


def unsupported_model_error(module: nn.Module, reason: str) -> UnsupportedModel:
    family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return UnsupportedModel(f"cannot measure this {family} model: {reason}")
