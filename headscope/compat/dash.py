"""Components of Dash that are imported when they are used.

A package of components imports all of them, of which the app uses a tenth: 230 classes with long docstrings, a sixth of
the time from the command to the first page. Dash generates the module `_imports_` of each package; without one, a later
version of a package imports all components again, and nothing else changes.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from headscope.compat.library_name import Library, LibraryName

MANTINE = Library("dash-mantine-components", ("2.8.0", "2.8.1"))
IMPORTED_COMPONENT = LibraryName(MANTINE, "dash_mantine_components._imports_:Select", "a fast start of the app")
PACKAGES = ("dash_mantine_components", "dash.html")
IMPORTS = "_imports_"


class LazyImports(MetaPathFinder, Loader):
    """Stands in for the module that imports all components of each package."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        return spec_from_loader(name, self) if module == IMPORTS and package in PACKAGES else None

    def exec_module(self, module: ModuleType) -> None:
        package = sys.modules[module.__name__.rpartition(".")[0]]
        vars(module).update(__all__=[], __getattr__=_component_getter(package))
        vars(package)["__getattr__"] = _component_getter(package)


def _component_getter(package: ModuleType) -> Callable[[str], Any]:
    """`__getattr__` of the package: the component of this name, which the package then has."""

    def get_component(name: str) -> Any:
        try:
            component = getattr(import_module(f"{package.__name__}.{name}"), name)
        except ModuleNotFoundError as error:
            raise AttributeError(f"module '{package.__name__}' has no attribute '{name}'") from error
        for resources in ("_js_dist", "_css_dist"):
            setattr(component, resources, vars(package)[resources])
        vars(package)[name] = component  # in place of the submodule of this name
        return component

    return get_component


def import_components_when_used() -> None:
    """Import the components of packages that are not imported yet one by one, when they are used."""
    if not any(isinstance(finder, LazyImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, LazyImports())
