"""A TransformerBridge of transformer-lens: it wraps a transformers model, and its attention has to reach the seam."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


def is_bridge(given: Any) -> bool:
    """Told by its class's home, so that transformer-lens need not be installed."""
    return type(given).__module__.startswith("transformer_lens.")


@contextmanager
def delegated(bridge: Any) -> Iterator[None]:
    """Let a TransformerBridge's attention run its wrapped module's own forward, and so reach the seam."""
    with ExitStack() as stack:
        for block in bridge.blocks if bridge is not None else ():
            attn = block.attn
            inner = attn.original_component
            # The bridge forwards attribute writes to the wrapped module, so its own __dict__ is written instead.
            previous = attn.__dict__.get("forward")
            attn.__dict__["forward"] = _Delegate(inner)
            stack.callback(_restore_forward, attn, previous)
        yield


class _Delegate:
    """Calls the wrapped attention module, hooks included."""

    def __init__(self, inner: nn.Module):
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _restore_forward(attn: nn.Module, previous: Any) -> None:
    if previous is None:
        attn.__dict__.pop("forward", None)
    else:
        attn.__dict__["forward"] = previous
