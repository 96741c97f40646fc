"""Tensors on device cuda without a card: shapes, dtypes and devices as on one, no numbers.

Launches are counted, and so are the calls that wait for the card: those that read a number, and plain copies.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headscope.attention.kernels import runtime

COSTS_NOTHING = ("empty", "_unsafe_view", "prim::")
"""Parts of the names of operations that launch nothing: memory is reserved, or something is asked of a tensor."""


COPIES = ("aten::_to_copy", "aten::copy_")
READERS: dict[Any, Any] = {Tensor.__bool__: True, Tensor.__int__: 0, Tensor.__index__: 0, Tensor.__float__: 0.0}
"""Functions that read a number of a tensor, and what they find in one that has none."""


class Launches(Counter[str]):
    """Number of launches by operation, and of the calls that wait for the card."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()


@contextmanager
def simulating_cuda() -> Iterator[Launches]:
    """Make tensors on device cuda, which have no numbers; counts the operations that each would launch something."""
    launches = Launches()

    def launch(kernel: Any, grid: Any, device: Any, *args: Any, **constants: Any) -> None:
        launches[kernel.__name__] += 1

    fake, kernels = _FakeCuda(allow_non_fake_inputs=True), mock.patch.object(runtime, "launch", launch)
    with fake, _Spelled(launches), _CountingLaunches(launches), kernels:
        yield launches


class _FakeCuda(FakeTensorMode):
    """Fakes tensors on device cuda and what is computed from them; other tensors of the CPU have numbers."""

    is_faking = False
    """Whether an operation runs that is made of others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        is_on_cuda = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not (self.is_faking or is_on_cuda or any(isinstance(leaf, FakeTensor) for leaf in leaves)):
            return func(*args, **(kwargs or {}))
        was_faking, self.is_faking = self.is_faking, True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self.is_faking = was_faking


class _CountingLaunches(TorchDispatchMode):
    """Counts what runs on a card: neither views of tensors, nor memory that is only reserved."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.counted = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        is_on_cuda = "cuda" in devices
        if len(devices) == 2 and func.name() in COPIES and not (kwargs or {}).get("non_blocking"):
            self.counted.waits[func.name()] += 1
        if is_on_cuda and not func.is_view and not any(part in func.name() for part in COSTS_NOTHING):
            self.counted[func.name()] += 1
        return result


class _Spelled(TorchFunctionMode):
    """Spells out what torch itself does only where it is built for CUDA."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.counted = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        if func in READERS and args[0].is_cuda:
            self.counted.waits[func.__name__] += 1
            return READERS[func]
        if func is Tensor.contiguous and args[0].is_cuda:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__ and args[0].is_cuda:
            return _indexed(*args)
        if func is Tensor.__setitem__ and args[0].is_cuda:
            is_on_cuda, index, value = args
            return torch.ops.aten.copy_(_indexed(is_on_cuda, index), value)
        if func is Tensor.copy_ and args[0].is_cuda and args[1].is_cuda:
            return torch.ops.aten.copy_(*args)
        return func(*args, **(kwargs or {}))


def _indexed(t: Tensor, index: Any) -> Tensor:
    """t[index], by views and at most one copy."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        at = next(n for n, part in enumerate(parts) if part is Ellipsis)
        index_count = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (t.dim() - index_count)
    dim, indices = 0, []
    for part in parts:
        if isinstance(part, int):
            t = t.select(dim, part)
            continue
        if part is None:
            t = t.unsqueeze(dim)
        elif isinstance(part, slice):
            t = torch.ops.aten.slice(t, dim, part.start, part.stop, part.step or 1)
        else:
            part = torch.tensor(part, device=t.device) if isinstance(part, list) else part
            indices += [None] * (dim - len(indices)) + [part]
        dim += 1
    return torch.ops.aten.index(t, indices) if indices else t
