"""Private names of torch: attention kernels with the log-sum-exp; hooks, buffers, write counts, compiled modules."""

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from headscope.compat.library_name import Library, LibraryName
from headscope.errors import IncompatibleLibrary, warn_once

if TYPE_CHECKING:
    from torch import Tensor, nn

TORCH = Library("torch", ("2.13.0", "2.15.0"))
ATTENTION_ON_GPU = "attention on a GPU"
COMPILED_MODULES = "modules that torch.compile returned"
HOOKS = "the hooks of a module"

CPU_FLASH_ATTENTION = LibraryName(
    TORCH,
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "fast attention on the CPU",
    ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"),
)
SDPA_CHOICE = LibraryName(TORCH, "torch:_fused_sdp_choice", ATTENTION_ON_GPU)
FLASH_ATTENTION = LibraryName(
    TORCH, "torch:ops.aten._flash_attention_forward", ATTENTION_ON_GPU, ("scale", "window_size_left")
)
EFFICIENT_ATTENTION = LibraryName(
    TORCH, "torch:ops.aten._efficient_attention_forward", ATTENTION_ON_GPU, ("scale", "window_size")
)
MASKED_EFFICIENT_ATTENTION = LibraryName(
    TORCH, "torch:ops.aten._scaled_dot_product_efficient_attention", ATTENTION_ON_GPU, ("attn_bias", "scale")
)
CUDNN_ATTENTION = LibraryName(
    TORCH, "torch:ops.aten._scaled_dot_product_cudnn_attention", ATTENTION_ON_GPU, ("attn_bias", "scale")
)


def _compile_module() -> Any:
    import torch

    return torch.compile(torch.nn.Identity())


COMPILED_CLASS = LibraryName(TORCH, "torch._dynamo:OptimizedModule", COMPILED_MODULES)
ORIGINAL_MODULE = LibraryName(
    TORCH, "torch._dynamo:OptimizedModule._orig_mod", COMPILED_MODULES, example=_compile_module
)
GRAPH_TASK = LibraryName(TORCH, "torch:_C._current_graph_task_id", "recomputed layers of a backward pass")
NON_PERSISTENT_BUFFERS = LibraryName(TORCH, "torch.nn:Module()._non_persistent_buffers_set", "digests of the weights")
WRITE_COUNT = LibraryName(TORCH, "torch:Tensor()._version", "noticing changed weights")
SAVE_STATE = LibraryName(TORCH, "torch.nn:Module._save_to_state_dict", "digests of quantized weights")
FORWARD_PRE_HOOKS = LibraryName(TORCH, "torch.nn:Module()._forward_pre_hooks", HOOKS)
FORWARD_HOOKS = LibraryName(TORCH, "torch.nn:Module()._forward_hooks", HOOKS)
BACKWARD_PRE_HOOKS = LibraryName(TORCH, "torch.nn:Module()._backward_pre_hooks", HOOKS)
BACKWARD_HOOKS = LibraryName(TORCH, "torch.nn:Module()._backward_hooks", HOOKS)
HOOK_KINDS = {
    FORWARD_PRE_HOOKS: "forward pre-hook",
    FORWARD_HOOKS: "forward hook",
    BACKWARD_PRE_HOOKS: "backward pre-hook",
    BACKWARD_HOOKS: "backward hook",
}
GLOBAL_HOOKS = {
    LibraryName(TORCH, f"torch.nn.modules.module:_global{name.attribute}", HOOKS): kind
    for name, kind in HOOK_KINDS.items()
}


def cpu_flash_attention() -> Callable[..., "tuple[Tensor, Tensor]"] | None:
    """torch's attention kernel for the CPU, which also returns the log-sum-exp; None, with a warning, without it."""
    try:
        kernel: Callable[..., tuple[Tensor, Tensor]] = CPU_FLASH_ATTENTION.resolve()
    except IncompatibleLibrary as error:
        warn_once(f"{error}. Until then, headscope computes the log-sum-exp in blocks of rows, which is slower")
        return None
    return kernel


def original_module(model: Any) -> Any:
    """The module inside one that torch.compile returned; other objects unchanged."""
    return ORIGINAL_MODULE.of(model) if isinstance(model, COMPILED_CLASS.resolve()) else model


def is_in_backward_pass() -> bool:
    """Whether autograd runs in this thread, as it does when gradient checkpointing repeats layers."""
    return bool(GRAPH_TASK.resolve()() != -1)


def module_hooks(module: "nn.Module") -> Iterator[tuple[str, Any]]:
    """(kind, function) of every hook of a module."""
    for name, kind in HOOK_KINDS.items():
        yield from ((kind, hook) for hook in name.of(module).values())


def global_hooks() -> Iterator[tuple[str, Any]]:
    """(kind, function) of every hook that all modules share."""
    for name, kind in GLOBAL_HOOKS.items():
        yield from ((kind, hook) for hook in name.resolve().values())


def non_persistent_buffers(module: "nn.Module") -> Collection[str]:
    """Names of the buffers that a state dict of the module leaves out."""
    names: Collection[str] = NON_PERSISTENT_BUFFERS.of(module)
    return names
