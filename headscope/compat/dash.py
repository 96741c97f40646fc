"""The components of Dash's packages that the app uses, without the others.

Dash generates the module `_imports_` of each package, which imports all its components. In Mantine's package and Dash's
own these are 327 classes with long docstrings. The app uses 54 of them. If a later version of a package has no such
module, all its components are imported again, and nothing else changes.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any


class SelectedImports(MetaPathFinder, Loader):
    """Stands in for the module that imports all components of a package, and imports those in `names` instead."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        return spec_from_loader(name, self) if module == "_imports_" and package in self.names else None

    def exec_module(self, module: ModuleType) -> None:
        package = sys.modules[module.__name__.rpartition(".")[0]]
        names = self.names[package.__name__].split()
        vars(module).update({name: _component(package, name) for name in names}, __all__=names)
        vars(module)["__getattr__"] = vars(package)["__getattr__"] = _getter(package)


def _component(package: ModuleType, name: str) -> Any:
    return getattr(import_module(f"{package.__name__}.{name}"), name)


def _getter(package: ModuleType) -> Callable[[str], Any]:
    """`__getattr__` of the package: imports another component when it is used, which the package then has."""

    def import_component(name: str) -> Any:
        try:
            component = _component(package, name)
        except ModuleNotFoundError as error:
            if error.name != f"{package.__name__}.{name}":
                raise
            raise AttributeError(f"module '{package.__name__}' has no attribute '{name}'") from error
        for resources in {"_js_dist", "_css_dist"} & {*vars(package)}:
            setattr(component, resources, vars(package)[resources])
        vars(package)[name] = component  # in place of the submodule of this name
        return component

    return import_component


def import_only(names: Mapping[str, str]) -> None:
    """Import only these components, separated by spaces, of each package that is not imported yet; others when used."""
    if not any(isinstance(finder, SelectedImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, SelectedImports(names))
