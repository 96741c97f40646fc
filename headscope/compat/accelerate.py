"""Private names of accelerate, which replaces the forward of modules that it places on several devices."""

from typing import TYPE_CHECKING, Any

from headscope.compat.library_name import Library, LibraryName

if TYPE_CHECKING:
    from torch import nn

ACCELERATE = Library("accelerate", ("1.1.0", "1.15.0"))
PLACED_MODULES = "modules that accelerate placed on several devices"


def _hooked_module() -> Any:
    from accelerate.hooks import ModelHook, add_hook_to_module  # type: ignore[import-untyped]
    from torch import nn

    return add_hook_to_module(nn.Identity(), ModelHook())


HOOK = LibraryName(ACCELERATE, "accelerate.hooks:module._hf_hook", PLACED_MODULES, example=_hooked_module)
REPLACED_FORWARD = LibraryName(
    ACCELERATE, "accelerate.hooks:module._old_forward", PLACED_MODULES, example=_hooked_module
)


def own_forward(module: "nn.Module") -> Any:
    """The forward stored on the module, without accelerate's wrapper; None if it has none. May be its class's."""
    attributes = vars(module)
    if HOOK.attribute not in attributes:
        return attributes.get("forward")
    return REPLACED_FORWARD.of(module)
