"""Building blocks of contexts that change a model: they may end in any order, and one thread at a time enters them.

A context changes a model, not a thread: every thread that runs the model inside the context runs the changed model.
Other models are never changed.
"""

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headscope.compat.torch import is_in_backward_pass
from headscope.errors import BadInput

_lock = threading.RLock()
_ABSENT = object()


@dataclass(eq=False)
class _OpenContext:
    undo: Callable[[], None]


_open_contexts: dict[Hashable, list[_OpenContext]] = {}


@contextmanager
def undoing(target: Hashable, change: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Call `change`, which returns the function that undoes it; leaving undoes it.

    Several contexts may change one target and end in any order. The target keeps the state of the last one that is
    open, and the last one that ends restores the state before the first.
    """
    with _lock:
        context = _OpenContext(change())
        contexts = _open_contexts.setdefault(target, [])
        contexts.append(context)
    try:
        yield
    finally:
        with _lock:
            index = contexts.index(context)
            if context is contexts[-1]:
                context.undo()
            else:  # the state before this context is now the state before the next one
                contexts[index + 1].undo = context.undo
            del contexts[index]
            if not contexts:
                del _open_contexts[target]


def replacing(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of an object itself, not of its class, inside the `with` (see `undoing`)."""
    attributes = vars(owner)

    def set_value() -> Callable[[], None]:
        previous = attributes.get(name, _ABSENT)
        attributes[name] = value

        def restore() -> None:
            if previous is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = previous

        return restore

    return undoing((id(attributes), name), set_value)


@contextmanager
def with_own_config(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model a copy of their config, which may be changed inside the `with`.

    Another model that was built from the same config object keeps it unchanged.
    """
    copies: dict[int, Any] = {}
    with ExitStack() as stack:
        for module in model.modules():
            for name, value in [*vars(module).items()]:
                if isinstance(value, PreTrainedConfig):
                    stack.enter_context(replacing(module, name, copy.deepcopy(value, copies)))
        yield


_entering_threads: "WeakKeyDictionary[nn.Module, list[threading.Thread]]" = WeakKeyDictionary()


@contextmanager
def entering(model: PreTrainedModel) -> Iterator[None]:
    """Register the running thread as the one that enters the model's contexts, and run without compiled graphs.

    Raises BadInput if another thread has entered one that is still open: each would change the passes of the other.
    """
    thread = threading.current_thread()
    with _lock:
        threads = _entering_threads.setdefault(model, [])
        other = next((entered for entered in threads if entered is not thread), None)
        if other is not None:
            raise BadInput(
                f"thread '{other.name}' has an open context on this {model.config.model_type} model. Enter all "
                f"contexts of a model in one thread, or load the model once more for thread '{thread.name}'"
            )
        threads.append(thread)
    try:
        with without_compiled_graphs():
            yield
    finally:
        with _lock:
            threads.remove(thread)


def without_compiled_graphs() -> AbstractContextManager[None]:
    """Run everything that torch.compile compiled as plain Python inside the `with`, in the whole process.

    Graphs contain neither the hooks that a context adds nor headscope's attention function, and torch does not look
    for new hooks before it runs a graph. Graphs are used again afterwards. Raises BadInput in compiled code.
    """
    return undoing("torch.compile", _stop_using_graphs)


def _stop_using_graphs() -> Callable[[], None]:
    try:
        if torch.compiler.is_compiling():
            raise RuntimeError  # torch would abort the compilation with an error of its own
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise BadInput(
            "a function that torch.compile compiled enters a context of headscope. Enter the context outside the "
            "compiled function"
        ) from error
    return lambda: stance.__exit__(None, None, None)


@contextmanager
def refusing_other_threads(
    modules: Iterable[nn.Module], model_name: str, thread: threading.Thread | None = None
) -> Iterator[None]:
    """Let one thread run these modules: `thread`, or else the first one that runs them while it is alive.

    A pass in another thread raises BadInput. Gradient checkpointing may run layers again in a thread of autograd.
    """

    def check_thread(module: nn.Module, args: Any) -> None:
        nonlocal thread
        running = threading.current_thread()
        if running is thread or is_in_backward_pass():
            return
        if thread is not None and thread.is_alive():
            raise BadInput(
                f"threads '{thread.name}' and '{running.name}' run '{model_name}' while headscope listens to it or "
                "edits it in the first one. Run it in one thread, or load it once more"
            )
        thread = running

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(check_thread).remove)
        yield
