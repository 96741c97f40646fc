"""Intercept the rotation calls of chosen modules, in whichever thread they run.

A family's attention looks up its rotation function by name in its Python module. While a context is open, this name
holds an object that runs the original function, except for calls from a chosen module: it is found among the modules
that the calling thread is running. So other models and other threads are not affected.
"""

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, update_wrapper
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from headscope.models.rotation import RotationCall

ROTATION_FUNCTIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")

Replacement = Callable[[nn.Module, RotationCall], Any]
"""(the chosen module that makes the call, the call) -> its result, or None for the result of the original function."""

_lock = threading.RLock()
_order = itertools.count()


@dataclass(frozen=True, eq=False)
class _RunningModule:
    """A chosen module while it runs. `frame` is that of the call: it stays on the thread's stack until the end.

    An interrupted call (KeyboardInterrupt) skips the hook that ends it, so the stack decides whether a module runs.
    """

    module: nn.Module
    replacement: Replacement
    order: int
    frame: FrameType

    def is_running(self) -> bool:
        """Whether the call is on the stack of the calling thread."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class _Thread(threading.local):
    """The chosen modules that a thread runs."""

    def __init__(self) -> None:
        self.running: list[_RunningModule] = []


_thread = _Thread()


@contextmanager
def intercepting_rotations(modules: Iterable[nn.Module], replacement: Replacement) -> Iterator[None]:
    """Pass every rotation call that these modules or their submodules make to `replacement`.

    Its result replaces that of the function; None keeps the original result. Of nested interceptions the innermost is
    called first.
    """
    modules, order = tuple(modules), next(_order)

    def enter(module: nn.Module, args: Any) -> None:
        frame = sys._getframe(1)
        _thread.running = [call for call in _thread.running if call.is_running()]
        _thread.running.append(_RunningModule(module, replacement, order, frame))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        _thread.running = [call for call in _thread.running if (call.module, call.order) != (module, order)]

    names = {type(submodule).__module__ for module in modules for submodule in module.modules()}
    with ExitStack() as stack:
        for namespace in (sys.modules[name] for name in names):
            for name in ROTATION_FUNCTIONS:
                if hasattr(namespace, name):
                    stack.enter_context(_intercepting(namespace, name))
        for module in modules:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


class _InterceptedFunction:
    """A rotation function whose calls from chosen modules are replaced; `users` counts the contexts that need it."""

    def __init__(self, original: Callable[..., Any]):
        self.original, self.function, self.users = original, inspect.unwrap(original), 0
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in sorted(_thread.running, key=lambda call: call.order, reverse=True):
            if call.is_running():
                arguments = dict(zip(_parameter_names(self.function), args, strict=False)) | kwargs
                result = call.replacement(call.module, RotationCall(self.function, arguments))
                if result is not None:
                    return result
        return self.original(*args, **kwargs)


@contextmanager
def _intercepting(namespace: ModuleType, name: str) -> Iterator[None]:
    """Make a rotation function interceptable; the last context that needs it restores it."""
    with _lock:
        function = getattr(namespace, name)
        if not isinstance(function, _InterceptedFunction):
            function = _InterceptedFunction(function)
            setattr(namespace, name, function)
        function.users += 1
    try:
        yield
    finally:
        with _lock:
            function.users -= 1
            # Another library may have replaced the function meanwhile; its replacement stays.
            if function.users == 0 and getattr(namespace, name) is function:
                setattr(namespace, name, function.original)


@cache
def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
