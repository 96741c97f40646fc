"""Collect and edit the hidden states that modules of decoder layers return."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
