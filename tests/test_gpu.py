"""What only a GPU can show: `TRITON_INTERPRET=0 pytest -n 0 -m cuda tests/test_gpu.py`, where one is."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from support import families

import headscope as hs
from headscope.attention.kernels import runtime
from headscope.forward.selfcheck import TOLERANCES, run_checks
from probes.measure.run import measure_tokens

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TABLES = ("attention", "pairs", "distance", "nll")


def model_on(device: str, dtype: torch.dtype, family: str = "llama-gqa") -> Any:
    return hs.load(families.SPECS[family].build().to(device, dtype))


def token_ids(length: int) -> torch.Tensor:
    return torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_check_agrees_and_every_kernel_ran(dtype: torch.dtype) -> None:
    checks = {check.quantity: check for check in run_checks(model_on("cuda", dtype), token_ids(192))}
    assert [check for check in checks.values() if not check.is_within_tolerance] == []
    assert {*checks} == {*TOLERANCES}
    assert not runtime.describe_kernels()["replaced_kernels"]


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma3", "glm"])
@pytest.mark.parametrize("rows", [32, None])
def test_tables_equal_those_of_the_cpu(family: str, rows: int | None) -> None:
    on_cpu, on_gpu = (
        measure_tokens(model_on(device, torch.float32, family), token_ids(200), TABLES, rows)
        for device in ("cpu", "cuda")
    )
    for table, columns in on_cpu.items():
        for name, column in columns.items():
            atol = 1e-3 * float(np.abs(column).max()) if column.dtype.kind == "f" else 0
            np.testing.assert_allclose(on_gpu[table][name], column, rtol=1e-3, atol=atol, err_msg=f"{table} {name}")


def test_waits_do_not_grow_with_the_number_of_layers() -> None:
    waits = []
    for layers in (2, 6):
        model = hs.load(families.build("llama", {"num_hidden_layers": layers}).to("cuda", torch.bfloat16))
        measure_tokens(model, token_ids(200), TABLES, 32)  # compiles the kernels
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                measure_tokens(model, token_ids(200), TABLES, 32)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
    assert waits[0] == waits[1]
