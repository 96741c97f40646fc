"""Triton kernels where there is no GPU: run in the interpreter on the CPU, or compiled for one and not run."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from headscope.attention.kernels import distance_sums, pair_moments, pair_products, pooled_map, row_sums, runtime
from headscope.attention.record import AttentionRecord
from support.measure_laws import geometry_of


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels run on CPU tensors, in tiles that small inputs cross; an error in a kernel is raised."""
    tiles = {
        pair_products: {"ELEMENTS_PER_TILE": 256},
        pair_moments: {"TOKENS": 16},
        distance_sums: {"QUERY_PARTS": 2, "DISTANCES": 16},
        row_sums: {"_tile_size": mock.Mock(return_value=((16, 16), 4))},
        runtime: {"_is_kernel_device": mock.Mock(return_value=True), "_replace": _fail},
    }
    with ExitStack() as stack:
        for module, values in tiles.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def _fail(what: str, reason: str) -> None:
    raise AssertionError(f"{what}: {reason}")


def compile_kernels(architecture: int) -> dict[str, Any]:
    """Compile every kernel for heads of 128 dimensions, in bfloat16: seconds by kernel.

    Run it in a process without TRITON_INTERPRET. The tensors are on the CPU and only give shapes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int64: "*i64"}
    seconds: dict[str, Any] = {}

    def compile_only(kernel: Any, grid: Any, device: Any, *args: Any, **constants: Any) -> None:
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        signature, constant, attributes = {}, {}, {}
        for index, name in enumerate(kernel.arg_names):
            value = constants.get(name, args[index] if index < len(args) else None)
            if isinstance(value, Tensor):
                signature[name], attributes[index,] = types[value.dtype], [["tt.divisibility", 16]]
            elif name in constants or value == 1:
                signature[name], constant[index,] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[index,] = [["tt.divisibility", 16]]
        start, source = time.monotonic(), ASTSource(kernel, signature, constant, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert compiled.asm["cubin"]
        seconds[f"{kernel.__name__} {len(seconds)}"] = round(time.monotonic() - start, 1)

    with mock.patch.object(runtime, "launch", compile_only):
        geometry = geometry_of(8, 2, 128, 64, windows=[None])
        q, k = (torch.zeros(heads, 256, 128, dtype=torch.bfloat16) for heads in (8, 2))
        record = AttentionRecord(0, 0, q, k, k, q, torch.zeros(8, 256), 0.1, 200, softcap=30.0)
        row_sums.row_sums(record)
        row_sums.row_sums(replace(record, window=None, softcap=None), torch.arange(64))
        pooled_map.add_pooled_map(record, torch.zeros(8, 128, 128), 64)
        pair_products.mean_abs_products(record, geometry, torch.arange(64))
        distance_sums.distance_sums(record, geometry, torch.arange(40))
        pair_moments.pair_moments(replace(record, window=None), geometry)
    return seconds
