"""Hidden states that parts of decoder layers return, collected and edited, and which call reads which output."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LayerParts = Sequence[Mapping[str, nn.Module]]
"""The modules of every decoder layer whose outputs are attn_out and mlp_out. A layer may lack one or both."""


@contextmanager
def collecting_parts(modules: Mapping[str, nn.Module]) -> Iterator[list[tuple[Tensor, str]]]:
    """Collect the hidden states that each module returns, with its name, in the order of the calls."""
    collected: list[tuple[Tensor, str]] = []

    def collect(name: str) -> Callable[[Tensor], Tensor]:
        def edit(hidden: Tensor) -> Tensor:
            collected.append((hidden, name))
            return hidden.clone()  # a layer may add to it in place

        return edit

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(editing_part(module, collect(name)))
        yield collected


@contextmanager
def editing_part(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Edit the hidden states that a module returns in the calls of the calling thread."""
    thread = threading.get_ident()

    def replace_output(module: nn.Module, args: Any, output: Any) -> Any:
        if threading.get_ident() != thread:
            return output
        edited = edit(residual_stream(output))
        return edited if isinstance(output, Tensor) else (edited, *output[1:])

    handle = module.register_forward_hook(replace_output)
    try:
        yield
    finally:
        handle.remove()


def residual_stream(output: Any) -> Tensor:
    """The residual stream in a decoder layer's output, or the hidden states in that of one of its modules."""
    stream: Tensor = output if isinstance(output, Tensor) else output[0]
    return stream


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
