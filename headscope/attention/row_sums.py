"""Attention output and sums over the keys of every query row, in one sweep over tiles of logits.

An online softmax as in FlashAttention (Dao et al. 2022): sums are relative to a reference logit of each row, and are
rescaled if a tile exceeds it by far. So row statistics need no second pass over the logits.

Axes: H query heads, G KV groups, r query heads per group, n rows of a block, Lq queries, Lk keys, d head dimension,
dv value dimension.
"""

import math

import torch
from torch import Tensor

from headscope.attention.kernel import AttentionVariant
from headscope.attention.record import LOCAL_DISTANCE, MASKED_LOGIT, RowSums

ROWS_PER_TILE, KEYS_PER_TILE, MAX_TILE_ELEMENTS = 128, 256, 2**19
"""Most query rows, keys and elements of a tile of logits. A tile fits the CPU's cache."""
MAX_EXCESS = 16.0
"""Base-2 logits may exceed their reference by this much before sums are rescaled. Small, since the entropy is a
difference of terms of this size."""
LOG2_E = math.log2(math.e)


@torch.no_grad()
def attend_with_row_sums(
    q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, first_key: int = 0
) -> tuple[Tensor, Tensor, RowSums]:
    """Causal attention of one sequence, the last Lq of Lk keys: z [H, Lq, dv], lse [H, Lq] and the row sums.

    q [H, Lq, d], k [G, Lk, d] and v [G, Lk, dv] are those of `kernel.attend`, and every variant is supported. Computed
    at least in float32; z has the dtype of q.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    (heads, queries, _), groups = q.shape, len(k)
    per_group = heads // groups
    rows_at_once = max(1, min(ROWS_PER_TILE, MAX_TILE_ELEMENTS // (per_group * KEYS_PER_TILE)))
    groups_at_once = max(1, MAX_TILE_ELEMENTS // (per_group * rows_at_once * KEYS_PER_TILE))
    parts = []
    for group in range(0, groups, groups_at_once):
        of_groups = slice(group, group + groups_at_once)
        of_heads = slice(group * per_group, (group + groups_at_once) * per_group)
        keys, values, head_variant = k[of_groups].to(precise), v[of_groups].to(precise), variant.for_heads(of_heads)
        blocks = []
        for start in range(0, queries, rows_at_once):
            rows = q[of_heads, start : start + rows_at_once].to(precise)
            own = k.shape[1] - queries + start
            blocks.append(_RowBlock(rows, keys, values, own, head_variant, first_key).sweep())
        parts.append([torch.cat(block, 1) for block in zip(*blocks, strict=True)])
    z, lse, *sums = (torch.cat(part) for part in zip(*parts, strict=True))
    return z.to(q.dtype), lse.float(), RowSums(*(of_rows.float() for of_rows in sums))


class _RowBlock:
    """Running sums of consecutive query rows, [G, r n] each, relative to `reference`.

    Logits are in base 2, since exp2 is faster than exp and does not slow down where it underflows.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, own: int, variant: AttentionVariant, first_key: int):
        """`own` is the index of the first row's own key."""
        self.k, self.v, self.own, self.variant, self.first_key = k, v, own, variant, first_key
        self.shape = (len(k), len(q) // len(k), q.shape[1])
        self.low = self._first_visible_keys()
        scale = variant.scaling / variant.softcap if variant.softcap else variant.scaling * LOG2_E
        self.q = (q * scale).reshape(len(k), -1, q.shape[-1]).contiguous()
        # Two keys that have much weight in many heads: the query's own and, if all rows see it, the first.
        queries = self.q.view(*self.shape, -1)
        reference = self._cap(torch.linalg.vecdot(queries, k[:, None, own : own + q.shape[1]]))
        if self.low[-1] == 0:
            reference = torch.maximum(reference, self._cap(torch.linalg.vecdot(queries, k[:, None, :1])))
        self.reference = reference.reshape(len(k), -1)
        sums = torch.zeros(6, *self.reference.shape, dtype=q.dtype)
        self.total, self.squares, self.weighted_logits, self.offsets, self.first_weight, self.local_weight = sums
        self.largest = torch.full_like(self.reference, MASKED_LOGIT)
        self.output = q.new_zeros(*self.reference.shape, v.shape[-1])

    def sweep(self) -> tuple[Tensor, ...]:
        """z [H, n, dv], lse [H, n] and the fields of `RowSums`, [H, n]."""
        low, stop = int(self.low[0]), self.own + self.shape[2]
        for tile_stop in range(stop, low, -KEYS_PER_TILE):
            self._add_tile(max(low, tile_stop - KEYS_PER_TILE), tile_stop)
        heads, rows = self.shape[0] * self.shape[1], self.shape[2]
        return tuple(result.reshape(heads, rows, *result.shape[2:]) for result in self._results())

    def _add_tile(self, start: int, stop: int) -> None:
        logits = self._cap(torch.bmm(self.q, self.k[:, start:stop].mT)).sub_(self.reference[..., None])
        self._hide_keys(logits.view(*self.shape, -1), start, stop)
        excess = logits.amax(-1)
        if excess.max() > MAX_EXCESS:
            self._move_reference(logits, excess)
        torch.maximum(self.largest, excess, out=self.largest)
        weights = logits.exp2()
        self.total += weights.sum(-1)
        self.squares += torch.linalg.vector_norm(weights, dim=-1).square_()
        self.weighted_logits += torch.linalg.vecdot(weights, logits)
        # Key indices relative to the block: far from the start, those of the sequence would lose precision.
        self.offsets += weights @ torch.arange(start - self.own, stop - self.own, dtype=weights.dtype)
        torch.baddbmm(self.output, weights, self.v[:, start:stop], out=self.output)
        if start == 0 and self.first_key == 0:
            self.first_weight += weights[..., 0]
        if stop > self.own - LOCAL_DISTANCE + 1:
            self._add_local_weights(weights.view(*self.shape, -1), start, stop)

    def _hide_keys(self, logits: Tensor, start: int, stop: int) -> None:
        """Hide keys after a row's own and before its first visible key in logits [G, r, n, keys]."""
        if stop > self.own + 1:
            first = max(start, self.own)
            is_later = torch.arange(first, stop) > self._own_keys()[:, None]
            logits[..., first - start :].masked_fill_(is_later, MASKED_LOGIT)
        if start < self.low[-1]:
            last = min(stop, int(self.low[-1]))
            is_earlier = torch.arange(start, last) < self.low[:, None]
            logits[..., : last - start].masked_fill_(is_earlier, MASKED_LOGIT)

    def _move_reference(self, logits: Tensor, excess: Tensor) -> None:
        """Raise the reference of rows to the largest logit of a tile, and rescale their sums."""
        shift = excess.clamp(min=0)
        factor = (-shift).exp2()
        self.weighted_logits -= shift * self.total
        for sums in (self.total, self.weighted_logits, self.offsets, self.first_weight, self.local_weight):
            sums *= factor
        self.squares *= factor.square()
        self.output *= factor[..., None]
        self.reference = self.reference + shift
        self.largest -= shift
        logits.sub_(shift[..., None])
        excess.sub_(shift)

    def _add_local_weights(self, weights: Tensor, start: int, stop: int) -> None:
        first = max(start, self.own - LOCAL_DISTANCE + 1)
        is_local = self._own_keys()[:, None] - torch.arange(first, stop) < LOCAL_DISTANCE
        self.local_weight += (weights[..., first - start :] * is_local).sum(-1).view(self.local_weight.shape)

    def _results(self) -> tuple[Tensor, ...]:
        keys_lse = (self.reference + self.total.log2()) / LOG2_E
        inverse = 1 / self.total
        lse, share = keys_lse, inverse
        if self.variant.sink is not None:
            sink = self.variant.sink.to(lse.dtype).view(self.shape[0], -1, 1)
            sink = sink.expand(self.shape).reshape(lse.shape)
            lse = torch.logaddexp(keys_lse, sink)
            share = inverse * (keys_lse - lse).exp()
        row_in_block = torch.arange(self.shape[2], dtype=lse.dtype).repeat(self.shape[1])
        return (
            self.output * share[..., None],
            lse,
            (self.reference + self.largest) / LOG2_E,
            self.largest.exp2() * share,
            self.first_weight * share,
            self.local_weight * share,
            self.squares * inverse.square(),
            (self.weighted_logits * inverse - self.total.log2()) / LOG2_E,
            row_in_block - self.offsets * inverse,
        )

    def _own_keys(self) -> Tensor:
        """Index of each row's own key, [n]."""
        return torch.arange(self.own, self.own + self.shape[2])

    def _first_visible_keys(self) -> Tensor:
        """Index of the first key that each row sees, [n], ascending."""
        own, low = self._own_keys(), torch.zeros(self.shape[2], dtype=torch.long)
        if self.variant.window is not None:
            low = (own - self.variant.window + 1).clamp(min=0)
        if self.variant.chunk_size is not None:
            chunk_start = (own + self.first_key) // self.variant.chunk_size * self.variant.chunk_size - self.first_key
            low = torch.maximum(low, chunk_start)
        return low

    def _cap(self, logits: Tensor) -> Tensor:
        """Base-2 logits after the soft cap, in place."""
        cap = self.variant.softcap
        return logits.tanh_().mul_(cap * LOG2_E) if cap else logits
