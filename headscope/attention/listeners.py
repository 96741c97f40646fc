"""Attention of one call with what its listeners need beside the output: log-sum-exp, sums of rows and of keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headscope.attention.kernel import AttentionVariant, attend
from headscope.attention.record import AttentionRecord, RowSums
from headscope.attention.row_sums import attend_with_row_sums

Listener = Callable[[AttentionRecord], None]


@dataclass(frozen=True)
class RegisteredListener:
    """A function that gets the attention records of one layer, and what it needs beside the output."""

    layer: int
    call: Listener
    needs_row_sums: bool
    key_columns: Tensor | None


@dataclass(frozen=True, eq=False)
class KernelResult:
    """Head outputs [B, H, Lq, dv] and the log-sum-exp; row sums by sequence, and key sums [B, H, Lq, n] by listener."""

    out: Tensor
    lse: Tensor | None = None
    row_sums: Sequence[RowSums | None] = ()
    key_sums: Sequence[Tensor | None] = ()


def attend_for_listeners(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    module: nn.Module,
    variant: AttentionVariant,
    dropout: float,
    listeners: Sequence[RegisteredListener],
    first_key: int,
) -> KernelResult:
    """Attention with the log-sum-exp, row sums and key sums that listeners need."""
    can_sum = q.device.type == "cpu" and not dropout and not torch.is_grad_enabled()
    columns = [listener.key_columns if can_sum and v.dtype == torch.float32 else None for listener in listeners]
    widths = [0 if numbers is None else numbers.shape[1] for numbers in columns]
    values = v
    if any(widths):
        keys = slice(first_key, first_key + v.shape[2])
        added = torch.cat([numbers[keys] for numbers in columns if numbers is not None], 1)
        values = torch.cat((v, added.expand(*v.shape[:2], -1, -1)), -1)
    row_sums: Sequence[RowSums | None] = [None] * len(q)
    lse: Tensor | None
    if can_sum and any(listener.needs_row_sums for listener in listeners):
        results = [attend_with_row_sums(*tensors, variant, first_key) for tensors in zip(q, k, values, strict=True)]
        outs, lses, row_sums = zip(*results, strict=True)
        out, lse = torch.stack(outs), torch.stack(lses)
    else:
        out, lse = attend(q, k, values, module, variant, dropout, bool(listeners), first_key)
    out, *sums = torch.split(out, [v.shape[-1], *widths], -1)
    key_sums = [part if width else None for part, width in zip(sums, widths, strict=True)]
    return KernelResult(out, lse, row_sums, key_sums)
