"""The declaration of a name of another library that may change without notice, and its check."""

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from headscope.errors import IncompatibleLibrary


@dataclass(frozen=True)
class Library:
    """A library by the name of its package in the index, and the versions with which its names were tried."""

    package: str
    tried: tuple[str, ...]


@dataclass(frozen=True)
class LibraryName:
    """A name of a library: `path` is "module:attributes", and an attribute that ends in "()" is called.

    `use` completes "headscope needs it for ...". `parameters` are names of parameters that headscope relies on.
    `example` returns an object that has the last attribute, if only objects in use have it.
    """

    library: Library
    path: str
    use: str
    parameters: tuple[str, ...] = ()
    example: Callable[[], Any] | None = None

    @property
    def attribute(self) -> str:
        """The last attribute of the path."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def resolve(self) -> Any:
        """What the name stands for. Raises IncompatibleLibrary, or ImportError without the library itself."""
        module_name, _, attributes = self.path.partition(":")
        importlib.import_module(module_name.partition(".")[0])
        try:
            value = importlib.import_module(module_name)
            for part in attributes.split(".") if self.example is None else ():
                value = getattr(value, part.removesuffix("()"))
                value = value() if part.endswith("()") else value
        except (ImportError, AttributeError) as error:
            raise self.missing() from error
        if self.example is not None:
            return self.of(self.example())
        if missing := [name for name in self.parameters if name not in parameter_names(value)]:
            raise self.missing(f" parameter '{missing[0]}' of")
        return value

    def of(self, owner: Any) -> Any:
        """The attribute of this object. Raises IncompatibleLibrary."""
        try:
            return getattr(owner, self.attribute)
        except AttributeError as error:
            raise self.missing() from error

    def replacing(self, value: Any) -> AbstractContextManager[Any]:
        """Set a name of a module to another value inside the `with`."""
        from unittest.mock import patch  # imports asyncio, which the command line need not wait for

        self.resolve()
        return patch.object(importlib.import_module(self.path.partition(":")[0]), self.attribute, value)

    def missing(self, detail: str = "") -> IncompatibleLibrary:
        """The error for a library without this name."""
        package, tried = self.library.package, self.library.tried
        return IncompatibleLibrary(
            f"{package} {version(package)} has no{detail} {self.path.replace(':', '.')}, which headscope needs for "
            f"{self.use}. Install {package} {' or '.join(tried)}"
        )


@cache
def parameter_names(function: Any) -> frozenset[str]:
    """Names of the parameters of a function, a class or an operator of torch."""
    if hasattr(function, "default") and hasattr(function, "overloads"):
        return frozenset(argument.name for argument in function.default._schema.arguments)
    return frozenset(inspect.signature(function).parameters)
