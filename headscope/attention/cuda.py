"""The fused kernels of CUDA, each of which returns the log-sum-exp beside the output: no product is made twice.

torch picks the kernel by device, dtype and head dimension, as it does for its own attention, of which these are the
inner calls: they also take windows, and queries that follow on cached keys. Knows tensors only, with the axes of
`kernel`; log-sum-exp [B, H, Lq] is float32, natural log.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import CausalVariant

HEAD_DIM_MULTIPLE = 8
"""Head dimensions are filled up with zeros to a multiple of this."""
MASK_ROW_ALIGNMENT = 16
"""The rows of a mask begin at multiples of this many numbers."""

QKV = tuple[Tensor, Tensor, Tensor]
"""q, k and v."""
Kernel = Callable[[Tensor, Tensor, Tensor, float, int | None], tuple[Tensor, Tensor]]
"""(q, k, v, scaling, window) -> output and log-sum-exp; the queries are the last of the keys."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp of the last Lq of Lk keys, of which each sees the last in its window; None where no kernel
    serves."""
    for heads in _kernel_ready_heads(q, k, v):
        kernel = _select_kernel(*heads, window)
        if kernel is not None:
            out, lse = kernel(*heads, scaling, window)
            return out[..., : v.shape[-1]], lse
    return None


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, visible_mask: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Output and log-sum-exp of queries that see the keys in `seen` [Lq, Lk]; None where no kernel serves."""
    queries, keys = visible_mask.shape
    bias = q.new_zeros(queries, -(-keys // MASK_ROW_ALIGNMENT) * MASK_ROW_ALIGNMENT)[:, :keys].masked_fill_(
        ~visible_mask, -torch.inf
    )
    for heads in _kernel_ready_heads(q, k, v):
        mask = bias.expand(*q.shape[:2], -1, -1)
        if can_use_efficient_attention(SDPAParams(*heads, mask, 0.0, False, True)):
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            out, lse, *_ = kernel(*heads, mask, True, 0.0, False, scale=scaling)
            return out[..., : v.shape[-1]], lse[..., :queries]
    return None


def _kernel_ready_heads(q: Tensor, k: Tensor, v: Tensor) -> Iterator[QKV]:
    """q, k and v of one even width, as kernels want them; then with a key head for every query head, as some do."""
    width = max(-(-t.shape[-1] // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE for t in (q, v))
    q, k, v = (t if t.shape[-1] == width else nn.functional.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    yield q, k, v
    each = q.shape[1] // k.shape[1]
    if each > 1:
        yield q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)


def _select_kernel(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Kernel | None:
    """The kernel that torch takes for these; of a window and cached keys its own choice knows nothing."""
    queries, keys = q.shape[2], k.shape[2]
    if window is None and queries in (1, keys):
        return _KERNELS.get(torch._fused_sdp_choice(q, k, v, None, 0.0, queries > 1, enable_gqa=True))
    asked = SDPAParams(q, k, v, None, 0.0, False, True)
    return _flash if can_use_flash_attention(asked) else _efficient if can_use_efficient_attention(asked) else None


def _flash(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    lengths = q.shape[2], k.shape[2]
    before = None if window is None else window - 1  # keys beside the query's own
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *_tokens_before_heads(q, k, v), None, None, *lengths, 0.0, True, False, scale=scaling, window_size_left=before
    )
    return out.transpose(1, 2), lse


def _efficient(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    no_lengths = None, None, None, None  # as of sequences packed into one
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        *_tokens_before_heads(q, k, v), None, *no_lengths, 0.0, _LOWER_RIGHT, True, scale=scaling, window_size=window
    )
    return out.transpose(1, 2), lse[..., : q.shape[2]]  # which is filled up to a multiple of 32


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = kernel(q, k, v, None, True, 0.0, q.shape[2] > 1, False, scale=scaling)
    return out, lse.view(q.shape[:3])  # which has an axis more


def _tokens_before_heads(*heads: Tensor) -> Iterator[Tensor]:
    """[B, H, L, d] -> [B, L, H, d]."""
    return (t.transpose(1, 2) for t in heads)


_LOWER_RIGHT = int(CausalVariant.LOWER_RIGHT)
_KERNELS: dict[int, Kernel] = {
    SDPBackend.FLASH_ATTENTION.value: _flash,
    SDPBackend.EFFICIENT_ATTENTION.value: _efficient,
    SDPBackend.CUDNN_ATTENTION.value: _cudnn,
}
