"""The open headscope contexts of each model, which runs inside them record."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


@dataclass(eq=False)
class OpenContext:
    """A context that changes a model: what it does, the schedule that it attaches, if any, and who entered it.

    `model` is the object that it was entered with; several may share one module.
    """

    description: str
    model: Any = None
    scheme_spec: Any = None
    schedule: Any = None
    thread: int = field(default_factory=threading.get_ident)


_open: "WeakKeyDictionary[nn.Module, list[OpenContext]]" = WeakKeyDictionary()


@contextmanager
def entered(module: nn.Module, context: OpenContext) -> Iterator[OpenContext]:
    """Record that the model of `module` is in a context inside the `with`."""
    contexts = _open.setdefault(module, [])
    contexts.append(context)
    try:
        yield context
    finally:
        contexts.remove(context)


def contexts_of(module: nn.Module) -> list[OpenContext]:
    """The open contexts of a model, the innermost last."""
    return [*_open.get(module, ())]


def attached_scheme(module: nn.Module) -> OpenContext | None:
    """The innermost context that attaches a position scheme to a model; None if there is none."""
    return next((context for context in reversed(_open.get(module, ())) if context.schedule is not None), None)


def contexts_of_thread() -> list[OpenContext]:
    """The contexts that this thread has entered, of all models."""
    thread = threading.get_ident()
    return [context for contexts in _open.values() for context in contexts if context.thread == thread]


def while_innermost(module: nn.Module, context: OpenContext, function: Callable[..., Any]) -> Callable[..., Any]:
    """An edit (q, k, v, positions) that does nothing while a context inside this one attaches another scheme."""

    def edit(q: Any, k: Any, v: Any, positions: Any) -> Any:
        return function(q, k, v, positions) if attached_scheme(module) is context else (q, k, v)

    return edit
