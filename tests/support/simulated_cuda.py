"""Tensors on device cuda without a card: shapes, dtypes and devices as on one, no numbers; launches are counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COSTS_NOTHING = ("empty", "_unsafe_view", "prim::")
"""Parts of the names of operations that launch nothing: memory is reserved, or something is asked of a tensor."""


@contextmanager
def simulating_cuda() -> Iterator[Counter[str]]:
    """Make tensors on device cuda, which have no numbers; counts the operations that each would launch something."""
    launches = _Launches()
    with FakeTensorMode(allow_non_fake_inputs=True), _Spelled(), launches:
        yield launches.counted


class _Launches(TorchDispatchMode):
    """Counts what runs on a card: neither views of tensors, nor memory that is only reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_on_cuda = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs, result)))
        if is_on_cuda and not func.is_view and not any(part in func.name() for part in COSTS_NOTHING):
            self.counted[func.name()] += 1
        return result


class _Spelled(TorchFunctionMode):
    """Spells out what torch itself does only where it is built for CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous and args[0].is_cuda:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.__getitem__ and args[0].is_cuda:
            return _indexed(*args)
        if func is Tensor.__setitem__ and args[0].is_cuda:
            is_on_cuda, index, value = args
            return torch.ops.aten.copy_(_indexed(is_on_cuda, index), value)
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
            indices += [None] * (dim - len(indices)) + [part]
        dim += 1
    return torch.ops.aten.index(t, indices) if indices else t
