"""Fused CUDA attention kernels that return the log-sum-exp together with the output, so no product is computed twice.

torch selects the kernel by device, dtype and head dimension, as for its own attention. The functions called here are
the inner ones of torch's attention: they also support windows, and queries that follow cached keys. All functions take
tensors with the axes of `kernel`; the log-sum-exp is [B, H, Lq], float32, natural log.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalVariant

from headscope.compat import torch as compat

HEAD_DIM_MULTIPLE = 8
"""Head dimensions are padded with zeros to a multiple of this."""
MASK_ROW_ALIGNMENT = 16
"""Rows of a mask start at multiples of this many elements."""

QKV = tuple[Tensor, Tensor, Tensor]
"""q, k and v."""
Kernel = Callable[[Tensor, Tensor, Tensor, float, int | None], tuple[Tensor, Tensor]]
"""(q, k, v, scaling, window) -> (output, log-sum-exp). The queries belong to the last keys."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp of causal attention, optionally with a window; None if no kernel supports it.

    The Lq queries belong to the last of the Lk keys.
    """
    for heads in _kernel_ready_heads(q, k, v):
        kernel = _select_kernel(*heads, window)
        if kernel is not None:
            out, lse = kernel(*heads, scaling, window)
            return out[..., : v.shape[-1]], lse
    return None


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, visible_mask: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp under `visible_mask` [Lq, Lk], True where visible; None if no kernel supports it."""
    queries, keys = visible_mask.shape
    bias = q.new_zeros(queries, -(-keys // MASK_ROW_ALIGNMENT) * MASK_ROW_ALIGNMENT)[:, :keys].masked_fill_(
        ~visible_mask, -torch.inf
    )
    for heads in _kernel_ready_heads(q, k, v):
        mask = bias.expand(*q.shape[:2], -1, -1)
        if can_use_efficient_attention(SDPAParams(*heads, mask, 0.0, False, True)):
            kernel = compat.MASKED_EFFICIENT_ATTENTION.resolve()
            out, lse, *_ = kernel(*heads, mask, True, 0.0, False, scale=scaling)
            return out[..., : v.shape[-1]], lse[..., :queries]
    return None


def _kernel_ready_heads(q: Tensor, k: Tensor, v: Tensor) -> Iterator[QKV]:
    """q, k and v padded to a common width; then with k and v repeated for every query head, as some kernels need."""
    width = max(-(-t.shape[-1] // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE for t in (q, v))
    q, k, v = (t if t.shape[-1] == width else nn.functional.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    yield q, k, v
    heads_per_group = q.shape[1] // k.shape[1]
    if heads_per_group > 1:
        yield q, k.repeat_interleave(heads_per_group, 1), v.repeat_interleave(heads_per_group, 1)


def _select_kernel(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Kernel | None:
    """The kernel that torch would choose; its own choice does not cover windows and cached keys."""
    queries, keys = q.shape[2], k.shape[2]
    if window is None and queries in (1, keys):
        choice = compat.SDPA_CHOICE.resolve()(q, k, v, None, 0.0, queries > 1, enable_gqa=True)
        return _KERNELS.get(choice)
    params = SDPAParams(q, k, v, None, 0.0, False, True)
    return _flash if can_use_flash_attention(params) else _efficient if can_use_efficient_attention(params) else None


def _flash(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    lengths = q.shape[2], k.shape[2]
    before = None if window is None else window - 1  # the kernel does not count the query's own key
    out, lse, *_ = compat.FLASH_ATTENTION.resolve()(
        *_tokens_before_heads(q, k, v), None, None, *lengths, 0.0, True, False, scale=scaling, window_size_left=before
    )
    return out.transpose(1, 2), lse


def _efficient(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    no_lengths = None, None, None, None  # only packed sequences have them
    out, lse, *_ = compat.EFFICIENT_ATTENTION.resolve()(
        *_tokens_before_heads(q, k, v), None, *no_lengths, 0.0, _LOWER_RIGHT, True, scale=scaling, window_size=window
    )
    return out.transpose(1, 2), lse[..., : q.shape[2]]  # the kernel pads lse to a multiple of 32


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = compat.CUDNN_ATTENTION.resolve()(q, k, v, None, True, 0.0, q.shape[2] > 1, False, scale=scaling)
    return out, lse.view(q.shape[:3])  # the kernel returns lse with a fourth axis


def _tokens_before_heads(*heads: Tensor) -> Iterator[Tensor]:
    """[B, H, L, d] -> [B, L, H, d]."""
    return (t.transpose(1, 2) for t in heads)


_LOWER_RIGHT = int(CausalVariant.LOWER_RIGHT)
_KERNELS: dict[int, Kernel] = {
    SDPBackend.FLASH_ATTENTION.value: _flash,
    SDPBackend.EFFICIENT_ATTENTION.value: _efficient,
    SDPBackend.CUDNN_ATTENTION.value: _cudnn,
}


def without_waiting(device: torch.device, t: Tensor) -> Tensor:
    """A tensor on the device. From a CPU to a GPU it goes through pinned memory: other copies wait for earlier work."""
    if t.device.type != "cpu":
        return t.to(device)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
