"""TransformerLens's TransformerBridge: run the attention of the transformers model that it wraps."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from headscope.attention.contexts import replacing


def is_bridge(model: Any) -> bool:
    """Whether `model` is a TransformerBridge, judged by its module's name: transformer-lens may not be installed."""
    return type(model).__module__.startswith("transformer_lens.")


@contextmanager
def delegating_attention(bridge: Any) -> Iterator[None]:
    """Let the attention of a TransformerBridge (or None) run the wrapped module's forward, which uses the backend."""
    with ExitStack() as stack:
        for block in bridge.blocks if bridge is not None else ():
            stack.enter_context(replacing(block.attn, "forward", _Delegate(block.attn.original_component)))
        yield


class _Delegate:
    """Call the wrapped attention module, including its hooks."""

    def __init__(self, wrapped: nn.Module):
        self.wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)
