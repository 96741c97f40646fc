"""Refuse calls of the attention function that headscope would compute wrongly."""

from typing import Any

from torch import Tensor, nn

from headscope.attention.chosen_keys import ChosenKeys
from headscope.attention.masks import DecodedMask
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


def refuse_unsupported_mask(module: nn.Module, mask: DecodedMask, has_indexer: bool) -> None:
    """Raise UnsupportedModel for a cache that lost keys which the layer attends to, and for padding beside an
    indexer."""
    if any(mask.dropped_keys) and not (mask.window or mask.chunk_size):
        # Moshi: its sliding cache drops keys that its attention sees without a cache.
        reason = (
            "its cache has dropped keys that it attends to without a cache, also in transformers. Pass use_cache=False"
        )
        raise unsupported_model_error(module, reason)
    if mask.key_roles is not None and has_indexer:
        raise unsupported_model_error(
            module, "its indexer may choose other keys in a padded batch. Pass one sequence at a time"
        )


def keys_of_indexer(
    module: Any, q: Tensor, k: Tensor, indices: Tensor | None, block_indices: Tensor | None
) -> ChosenKeys | None:
    """The keys that the module's indexer chose; None if it chose all, or if the family has no indexer.

    Raises UnsupportedModel for a choice that comes from elsewhere, and for blocks of unknown size.
    """
    if indices is None and block_indices is None:
        return None
    block_size = 1 if block_indices is None else getattr(getattr(module, "indexer", None), "block_size", None)
    if not hasattr(module, "indexer") or block_size is None:
        reason = "each query attends only to keys or blocks of keys that an unknown indexer chose. Use another model"
        raise unsupported_model_error(module, reason)
    choice = block_indices if indices is None else indices[:, None]
    assert choice is not None
    if choice.shape[-1] * block_size >= k.shape[2]:
        return None
    return ChosenKeys(choice, q.shape[1] // choice.shape[1], block_size)


def unsupported_model_error(module: nn.Module, reason: str) -> UnsupportedModel:
    family = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    return UnsupportedModel(f"cannot measure this {family} model: {reason}")
