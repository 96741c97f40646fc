"""torch without its attention kernel for the CPU, as in a version that renames it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._decomp.decompositions as decompositions  # uses the kernel when it is imported

from headscope.compat.torch import CPU_FLASH_ATTENTION

assert decompositions

IN_WHOLE_SESSION = bool(os.environ.get("HEADSCOPE_TEST_WITHOUT_CPU_KERNEL"))
"""Whether all tests run without the kernel."""
NEEDS_NAME = "looks up the kernel by its name, as torch's dispatch modes do"
needs_kernel_name = pytest.mark.skipif(IN_WHOLE_SESSION, reason=NEEDS_NAME)


@contextmanager
def without_cpu_kernel() -> Iterator[None]:
    """Remove the name of the kernel inside the `with`. torch's own attention does not use the name."""
    operators = torch.ops.aten
    look_up = type(operators).__getattr__

    def refuse_kernel(self: Any, name: str) -> Any:
        if self is operators and name == CPU_FLASH_ATTENTION.attribute:
            raise AttributeError(name)
        return look_up(self, name)

    vars(operators).pop(CPU_FLASH_ATTENTION.attribute, None)
    with patch.object(type(operators), "__getattr__", refuse_kernel):
        yield
