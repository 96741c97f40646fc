"""Attention of one call with what its listeners need beside the output: log-sum-exp, sums of rows and of keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headscope.attention.kernel import AttentionVariant, attend
from headscope.attention.record import AttentionRecord, RowSums
from headscope.attention.row_sums import attend_with_row_sums
from headscope.errors import BadInput

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
    module: nn.Module | None,
    variant: AttentionVariant,
    dropout: float,
    listeners: Sequence[RegisteredListener],
    first_key: int,
) -> KernelResult:
    """Attention with the log-sum-exp, row sums and key sums that listeners need.

    There are no key sums where the listeners have more distinct columns than a head has dimensions: the kernel would
    then cost more than a second visit of the weights. Raises BadInput for `key_columns` with fewer rows than keys.
    """
    keys = slice(first_key, first_key + v.shape[2])
    for listener in listeners:
        if listener.key_columns is not None and (rows := len(listener.key_columns)) < keys.stop:
            raise BadInput(f"key_columns has {rows} rows for {keys.stop} keys. Pass one row for every key of the text")
    can_sum = q.device.type == "cpu" and not dropout and not torch.is_grad_enabled() and variant.chosen is None
    columns, places = torch.empty(0, 0), list[Tensor]()
    if can_sum and v.dtype == torch.float32:
        columns, places = _distinct_key_columns(listeners, keys)
    has_key_sums = 0 < columns.shape[1] <= q.shape[-1]
    values = torch.cat((v, columns.expand(*v.shape[:2], -1, -1)), -1) if has_key_sums else v
    row_sums: Sequence[RowSums | None] = [None] * len(q)
    lse: Tensor | None
    if can_sum and any(listener.needs_row_sums for listener in listeners):
        results = [attend_with_row_sums(*tensors, variant, first_key) for tensors in zip(q, k, values, strict=True)]
        outs, lses, row_sums = zip(*results, strict=True)
        out, lse = torch.stack(outs), torch.stack(lses)
    else:
        out, lse = attend(q, k, values, module, variant, dropout, bool(listeners), first_key)
    out, sums = out.tensor_split([v.shape[-1]], -1)
    key_sums = (
        [sums[..., place] if len(place) else None for place in places] if has_key_sums else [None] * len(listeners)
    )
    return KernelResult(out, lse, row_sums, key_sums)


def _distinct_key_columns(listeners: Sequence[RegisteredListener], keys: slice) -> tuple[Tensor, list[Tensor]]:
    """The distinct columns of all listeners for these keys of the text, [Lk, n], and the place of each column."""
    by_listener = [None if listener.key_columns is None else listener.key_columns[keys] for listener in listeners]
    widths = [0 if columns is None else columns.shape[1] for columns in by_listener]
    if not any(widths):
        return torch.empty(0, 0), []
    joined = torch.cat([columns for columns in by_listener if columns is not None], 1)
    distinct, places = torch.unique(joined, dim=1, return_inverse=True)
    return distinct, [*places.split(widths)]
