"""Private names of TransformerLens: the wrapped module of a bridge's component, and whether weights were processed."""

from typing import TYPE_CHECKING, Any

from headscope.compat.library_name import Library, LibraryName

if TYPE_CHECKING:
    from torch import nn

TRANSFORMER_LENS = Library("transformer-lens", ("4.3.0",))


def _component() -> Any:
    from torch import nn
    from transformer_lens.model_bridge.generalized_components import LinearBridge

    component = LinearBridge("example")
    component.set_original_component(nn.Linear(1, 1))
    return component


WRAPPED_MODULE = LibraryName(
    TRANSFORMER_LENS,
    "transformer_lens.model_bridge:component._original_component",
    "the model in a TransformerBridge",
    example=_component,
)
WEIGHTS_PROCESSED = "_weights_processed"
"""Attribute of a TransformerBridge: whether compatibility mode changed its weights."""


def wrapped_module(module: "nn.Module") -> "nn.Module | None":
    """The module that a component of a TransformerBridge wraps; None if `module` is no such component."""
    return dict(module.named_children()).get(WRAPPED_MODULE.attribute)


def has_processed_weights(bridge: Any) -> bool:
    """Whether compatibility mode has processed the weights of a TransformerBridge."""
    return bool(getattr(bridge, WEIGHTS_PROCESSED, False))
