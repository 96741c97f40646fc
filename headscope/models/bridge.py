"""TransformerLens's TransformerBridge: run the attention of the transformers model that it wraps."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from headscope.attention.contexts import replacing
from headscope.compat.transformer_lens import has_processed_weights
from headscope.errors import UnsupportedModel


def is_bridge(model: Any) -> bool:
    """Whether `model` is a TransformerBridge, judged by its module's name: transformer-lens may not be installed."""
    return type(model).__module__.startswith("transformer_lens.")


def describe_bridge(bridge: Any) -> str | None:
    """Text about a TransformerBridge for run.json, with its compatibility mode; None without a bridge."""
    if bridge is None:
        return None
    is_compatible = getattr(bridge, "compatibility_mode", False)
    return "TransformerBridge in compatibility mode" if is_compatible else "TransformerBridge"


@contextmanager
def delegating_attention(bridge: Any) -> Iterator[None]:
    """Let the attention of a TransformerBridge (or None) run the wrapped module's forward, which uses the backend.

    Raises UnsupportedModel if the wrapped module lacks the bridge's weights.
    """
    _check_weights(bridge)
    with ExitStack() as stack:
        for block in bridge.blocks if bridge is not None else ():
            stack.enter_context(replacing(block.attn, "forward", _Delegate(block.attn.original_component)))
        yield


def _check_weights(bridge: Any) -> None:
    """Refuse processed weights that lie beside the wrapped model.

    Where a model projects q, k and v together, TransformerLens writes its processed weights into projections of its
    own; the wrapped model keeps the unprocessed ones.
    """
    if not has_processed_weights(bridge):
        return
    if any(type(block.attn).__name__.startswith("JointQKV") for block in bridge.blocks):
        raise UnsupportedModel(
            "cannot measure this TransformerBridge: compatibility mode processed copies of the weights that project q, "
            f"k and v together, and the {bridge.original_model.config.model_type} model inside has the original ones. "
            "Do not enable compatibility mode, or load the model without the bridge"
        )


class _Delegate:
    """Call the wrapped attention module, including its hooks."""

    def __init__(self, wrapped: nn.Module):
        self.wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)
