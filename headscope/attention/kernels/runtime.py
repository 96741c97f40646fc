"""Where Triton kernels run, and what replaces them: the torch code of the measures, if a kernel cannot run.

A module that can use a kernel calls `attempt` with it and falls back to its torch code if the answer is None.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord

log = logging.getLogger("headscope")

P = ParamSpec("P")
T = TypeVar("T")
SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256

_replaced: dict[str, str] = {}
"""Reasons why a kernel did not run, by kernel and shape."""


def runs_kernels(record: AttentionRecord) -> bool:
    """Whether Triton kernels can read the record: on CUDA, with Triton, in a dtype and head dimension they support."""
    q = record.q
    if not _is_kernel_device(q.device) or q.dtype not in SUPPORTED_DTYPES or q.shape[-1] > MAX_HEAD_DIM:
        return False
    if record.logit_edits:
        return False
    if record.chosen is not None:
        _replace("all kernels", "the model's indexer chooses the keys")
        return False
    if not has_triton():
        _replace("all kernels", "Triton is not installed")
        return False
    return True


GPU_FAULTS = ("out of memory", "an illegal memory access")
"""Faults of a launch that say nothing about the kernel, in the words of CUDA; Triton raises them as RuntimeError."""


def attempt(
    kernel: Callable[Concatenate[AttentionRecord, P], T], record: AttentionRecord, *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """Run a kernel. If it fails, warn once per shape and return None; errors of memory and of the GPU are raised."""
    heads, _, dim = record.q.shape
    shape = f"{kernel.__name__} for {heads} heads of {dim} dimensions in {str(record.q.dtype).removeprefix('torch.')}"
    if shape in _replaced:
        return None
    try:
        return kernel(record, *args, **kwargs)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # Triton, ptxas and the C compiler raise errors of many types
        if any(f"Triton Error [CUDA]: {fault}" in str(error) for fault in GPU_FAULTS):
            raise
        _replace(shape, f"{type(error).__name__}: {error}".splitlines()[0])
        return None


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its tensors."""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        kernel[grid](*args, **constants)


def describe_kernels() -> dict[str, Any]:
    """For run.json, on a GPU: the version of Triton, None without it, and the kernels that torch code replaced."""
    if not torch.cuda.is_available():
        return {}
    version = None
    if has_triton():
        import triton

        version = triton.__version__
    return {"triton": version, "replaced_kernels": dict(_replaced)}


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def unit_stride(t: Tensor) -> Tensor:
    """The tensor with stride 1 in its last dimension, as the kernels need."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _is_kernel_device(device: torch.device) -> bool:
    return device.type == "cuda"  # tests add the CPU, for Triton's interpreter


def _replace(what: str, reason: str) -> None:
    if what not in _replaced:
        _replaced[what] = reason
        log.warning("%s: %s. The slower torch code runs instead", what, reason)
