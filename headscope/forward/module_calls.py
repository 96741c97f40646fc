"""Calls of modules in a forward pass: their hidden states, and which call reads the output of which."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """One call of a module; `output` is a copy of `output_tensor`, to which a layer may add afterwards."""

    module: nn.Module
    inputs: list[Tensor]
    output_tensor: Tensor
    output: Tensor


def consumes_output(later_call: ModuleCall, call: ModuleCall) -> bool:
    """Whether a call received the output of another one unchanged."""
    return any(is_same_tensor(tensor, call.output_tensor) for tensor in later_call.inputs)


def is_same_tensor(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share the same memory."""
    return first.data_ptr() == second.data_ptr() and first.numel() == second.numel()


@contextmanager
def recording_calls(modules: Iterable[nn.Module]) -> Iterator[list[ModuleCall]]:
    """Record every call of these modules in the calling thread, in the order in which they return.

    The tensors are kept, so that memory addresses stay unique.
    """
    calls: list[ModuleCall] = []
    thread = threading.get_ident()

    def record_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [state for value in (*args, *kwargs.values()) if (state := _as_hidden_states(value)) is not None]
        if threading.get_ident() == thread and (state := extract_hidden_states(output)) is not None:
            calls.append(ModuleCall(module, inputs, state, state.clone()))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(record_call, with_kwargs=True).remove)
        yield calls


def extract_hidden_states(output: Any) -> Tensor | None:
    """The hidden states [1, n, D] in a module's output, or None."""
    output = getattr(output, "last_hidden_state", output)
    return _as_hidden_states(output[0] if isinstance(output, tuple) and output else output)


def _as_hidden_states(value: Any) -> Tensor | None:
    """A tensor [1, n, D] or [n, D], the form of some feed-forward modules, as [1, n, D]; None for other values."""
    if not isinstance(value, Tensor) or value.dim() not in (2, 3):
        return None
    return value if value.dim() == 3 else value[None]
