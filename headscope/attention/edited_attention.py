"""Attention of a layer whose logits are edited, by the cheapest way that computes it exactly.

Heads without edits of their logits keep the kernel, and so do rows whose edits leave out no key with weight: a choice
that keeps all keys changes no bit. Biases alone are dimensions added to q and k, so that the fused
kernel serves them. Heads that only stream read no other keys. Everything else is computed in blocks of rows from
`AttentionRecord.masked_logits`, which listeners use, too.

Axes: B sequences of the batch, H query heads, G KV groups, Lq queries, Lk keys, d head dimension, dv value dimension.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from headscope.attention.kernel import ROWS_PER_BLOCK, AttentionVariant, append_dimensions, attend
from headscope.attention.record import (
    AttentionRecord,
    BiasKind,
    ChoiceKind,
    LogitEdit,
    edited_logits,
    has_only,
    log_sum,
)
from headscope.attention.streaming_kernel import StreamingKind, streaming_attention

LOGITS_PER_BLOCK, LOGITS_PER_CUDA_BLOCK = 2**19, 2**26
"""Logits in memory at once: on a CPU as many as its cache holds."""


Kernel = Callable[["EditedLayer", Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, heads bool [H], out, lse) -> `out` and `lse` with those of the kernel for these heads."""


@dataclass(frozen=True, eq=False)
class EditedLayer:
    """q [B, H, Lq, d], k [B, G, Lk, d] and v [B, G, Lk, dv] of a layer, and the edits of its logits, masks [B, H, Lq].

    `kv_groups` is the number of the model's KV groups, which G exceeds under edits of the keys of single heads.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    variant: AttentionVariant
    first_key: int
    logit_edits: Sequence[LogitEdit]
    kv_groups: int
    head_numbers: Tensor | None = None
    """The layer's query heads that the heads are, if not all in order."""

    def record(self, sequence: int, z: Tensor | None = None, lse: Tensor | None = None) -> AttentionRecord:
        """The record of one sequence, for listeners."""
        edits = [edit.for_listeners for edit in self.logit_edits]
        return replace(self, logit_edits=edits).kernel_record(sequence, z, lse)

    def kernel_record(
        self, sequence: int, z: Tensor | None = None, lse: Tensor | None = None, heads: Tensor | None = None
    ) -> AttentionRecord:
        """The record of one sequence, of all heads or of some with keys of their own, to compute its outputs once."""
        variant, per_group = self.variant, self.q.shape[1] // self.k.shape[1]
        q, k, v = self.q[sequence], self.k[sequence], self.v[sequence]
        edits, sink = [edit.at(sequence) for edit in self.logit_edits], variant.sink
        if heads is not None:
            at, groups = heads.to(q.device), (heads // per_group).to(q.device)
            q, k, v, sink = q[at], k[groups], v[groups], None if sink is None else sink[at]
            edits = [edit.at(heads) for edit in edits]
        z = q.new_empty(len(q), 0, 0) if z is None else z
        lse = q.new_empty(len(q), 0) if lse is None else lse
        return AttentionRecord(
            self.layer, sequence, q, k, v, z, lse, variant.scaling, variant.window, self.first_key,
            variant.chunk_size, variant.softcap, sink,
            chosen=None if variant.chosen is None else variant.chosen.of_sequence(sequence),
            logit_edits=[edit for edit in edits if bool(edit.mask.any())],
            kv_groups=self.kv_groups if self.kv_groups != len(k) and heads is None else None,
            head_numbers=self.head_numbers if heads is None else heads,
        )  # fmt: skip

    @property
    def touched(self) -> Tensor:
        """The heads whose logits are edited, bool [B, H]."""
        return torch.stack([edit.mask.any(-1) for edit in self.logit_edits]).any(0)


def attend_with_edits(
    layer: EditedLayer, module: nn.Module | None = None, dropout: float = 0.0, with_lse: bool = False
) -> tuple[Tensor, Tensor]:
    """Head outputs [B, H, Lq, dv] and log-sum-exp [B, H, Lq], float32, after the edits of the logits.

    Weights of another run do not change the log-sum-exp, relative to which `AttentionRecord.weights` states them.
    Without `with_lse` it is that of edited heads only. `module` is as in `kernel.attend`.
    """
    kernel = partial(_attend_dense, module=module, dropout=dropout, with_lse=with_lse)
    out = layer.q.new_empty(*layer.q.shape[:3], layer.v.shape[-1])
    lse = layer.q.new_empty(layer.q.shape[:3], dtype=torch.float32)
    touched, chosen = layer.touched, layer.variant.chosen
    rows = torch.stack([edit.mask.flatten(0, 1).any(0) for edit in layer.logit_edits]).any(0).nonzero()[:, 0]
    needs_dense = ~touched.all(0) | (len(rows) < layer.q.shape[2])
    if bool(needs_dense.any()):
        out, lse = kernel(layer, needs_dense, out, lse)
    edits = [edit.kind for edit in layer.logit_edits]
    if chosen is not None and any(isinstance(kind, ChoiceKind) and kind.replaces_indexer for kind in edits):
        replaced = torch.stack(
            [
                edit.mask.any(-1)
                for edit in layer.logit_edits
                if isinstance(edit.kind, ChoiceKind) and edit.kind.replaces_indexer
            ]
        ).any(0)
        without_indexer = replace(layer, variant=replace(layer.variant, chosen=None))
        out, lse = _attend_touched(without_indexer, touched & replaced, rows, out, lse, kernel)
        touched = touched & ~replaced
    if bool(touched.any()):
        out, lse = _attend_touched(layer, touched, rows, out, lse, kernel)
    return out, lse


def _attend_dense(
    layer: EditedLayer,
    heads: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    module: nn.Module | None,
    dropout: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` with those of heads bool [H] without edits of their logits, by the kernel."""
    inputs = layer.q, layer.k, layer.v
    if bool(heads.all()) or layer.variant.chosen is not None:
        dense, sums = attend(*inputs, module, layer.variant, dropout, with_lse, layer.first_key)
        return dense, lse if sums is None else sums
    is_of_group = heads.view(layer.k.shape[1], -1).any(1)
    groups = is_of_group.nonzero()[:, 0].to(out.device)
    at = is_of_group.repeat_interleave(len(heads) // len(is_of_group)).nonzero()[:, 0].to(out.device)
    sink = None if layer.variant.sink is None else layer.variant.sink[at]
    dense, sums = attend(
        layer.q[:, at], layer.k[:, groups], layer.v[:, groups], None, replace(layer.variant, sink=sink), dropout,
        with_lse, layer.first_key,
    )  # fmt: skip
    return out.index_copy(1, at, dense), lse if sums is None else lse.index_copy(1, at, sums)


def _attend_touched(
    layer: EditedLayer, touched: Tensor, rows: Tensor, out: Tensor, lse: Tensor, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` with the outputs of the touched heads [B, H] at rows [n] and their log-sum-exp.

    Rows that keep their weights have those of the kernel.
    """
    edits, variant = layer.logit_edits, layer.variant
    if has_only(edits, BiasKind) and variant.softcap is None:
        return _with(_attend_with_biases(layer, touched), out, lse)
    if len(edits) == 1 and isinstance(edits[0].kind, StreamingKind) and bool(edits[0].mask[touched].all()):
        return _with(_attend_streaming(layer, touched, edits[0].kind), out, lse)
    is_layer_wide = any(isinstance(edit.kind, ChoiceKind) and edit.kind.is_layer_wide for edit in edits)
    rows = rows.to(out.device)
    is_unchanged = torch.zeros(out.shape[:3], dtype=torch.bool, device=out.device)
    if len(out) > 1 and not is_layer_wide and variant.chosen is None:
        sequences, heads = touched.nonzero(as_tuple=True)
        pairs = _pairs_as_one_sequence(layer, sequences, heads)
        z, sums, is_kept = outputs_at_rows(pairs.kernel_record(0), rows)
        index = sequences.to(out.device)[:, None], heads.to(out.device)[:, None], rows
        is_unchanged[index] = is_kept
        out, lse = out.index_put(index, z.to(out.dtype)), lse.index_put(index, sums)
        return _with_kernel(layer, is_unchanged, out, lse, kernel)
    for sequence in touched.any(1).nonzero()[:, 0].tolist():
        heads = touched[sequence].nonzero()[:, 0]
        is_whole = is_layer_wide or variant.chosen is not None or len(heads) == touched.shape[1]
        z, sums, is_kept = outputs_at_rows(layer.kernel_record(sequence, heads=None if is_whole else heads), rows)
        at = heads.to(out.device)
        z, sums, is_kept = (z[at], sums[at], is_kept[at]) if is_whole else (z, sums, is_kept)
        index = torch.tensor(sequence, device=out.device), at[:, None], rows
        is_unchanged[index] = is_kept
        out, lse = out.index_put(index, z.to(out.dtype)), lse.index_put(index, sums)
    return _with_kernel(layer, is_unchanged, out, lse, kernel)


def _with_kernel(
    layer: EditedLayer, is_unchanged: Tensor, out: Tensor, lse: Tensor, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` with those of the kernel at rows bool [B, H, Lq] whose edits change no weight."""
    queries, keys = layer.q.shape[2], layer.k.shape[2]
    heads = torch.ones(out.shape[1], dtype=torch.bool)
    if out.device.type == "cpu":  # a GPU is not waited for
        rows = is_unchanged.flatten(0, 1).any(0).nonzero()
        if not len(rows):
            return out, lse
        heads = is_unchanged.any(-1).any(0)
        if layer.variant.chosen is None:  # rows after the last one need no kernel
            queries = min(queries, -(-(int(rows[-1]) + 1) // ROWS_PER_BLOCK) * ROWS_PER_BLOCK)
    keys -= layer.q.shape[2] - queries
    part = replace(layer, q=layer.q[:, :, :queries], k=layer.k[:, :, :keys], v=layer.v[:, :, :keys])
    dense, sums = kernel(part, heads, out[:, :, :queries], lse[:, :, :queries])
    is_dense = is_unchanged[:, :, :queries]
    dense = torch.where(is_dense[..., None], dense, out[:, :, :queries])
    sums = torch.where(is_dense, sums, lse[:, :, :queries])
    return torch.cat((dense, out[:, :, queries:]), 2), torch.cat((sums, lse[:, :, queries:]), 2)


def _with(results: Iterator[tuple[Tensor, Tensor, Tensor, Tensor]], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` with results (sequences [n], heads [n], outputs [n, Lq, dv], log-sum-exp [n, Lq])."""
    for sequences, heads, z, sums in results:
        index = sequences.to(out.device), heads.to(out.device)
        out, lse = out.index_put(index, z), lse.index_put(index, sums)
    return out, lse


def _attend_with_biases(layer: EditedLayer, touched: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Heads whose logits have biases only, by the kernel: biases are dimensions added to q and k."""
    tokens = layer.first_key + torch.arange(layer.k.shape[2], device=layer.k.device)
    chosen = layer.variant.chosen
    sequences, heads = touched.nonzero(as_tuple=True)
    per_group = layer.q.shape[1] // layer.k.shape[1]
    if chosen is None:
        at = sequences.to(layer.q.device), heads.to(layer.q.device)
        q, k, v = (t[at[0], at[1] // (1 if t is layer.q else per_group)][:, None] for t in (layer.q, layer.k, layer.v))
        sink = None if layer.variant.sink is None else layer.variant.sink[at[1]]
        masks = [edit.mask[sequences, heads][:, None] for edit in layer.logit_edits]
    else:
        q, k, v, sink = layer.q, layer.k, layer.v, layer.variant.sink
        masks = [edit.mask for edit in layer.logit_edits]
    for edit, mask in zip(layer.logit_edits, masks, strict=True):
        assert isinstance(edit.kind, BiasKind)
        bias = edit.kind.bias(tokens, edit.prompt_length)
        q, k = append_dimensions(q, k, bias, mask.to(q.device), layer.variant.scaling)
    if sink is not None and chosen is None:
        yield from _one_by_one(q, k, v, sink, layer, sequences, heads)
        return
    out, lse = attend(q, k, v, None, layer.variant, 0.0, True, layer.first_key)
    assert lse is not None
    if chosen is None:
        yield sequences, heads, out[:, 0], lse[:, 0]
    else:
        at = sequences.to(out.device), heads.to(out.device)
        yield sequences, heads, out[at], lse[at]


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, layer: EditedLayer, sequences: Tensor, heads: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Heads with learned sinks: a kernel has one sink per head, and here heads are sequences."""
    for head in range(len(q)):
        own = slice(head, head + 1)
        variant = replace(layer.variant, sink=sink[own])
        out, lse = attend(q[own], k[own], v[own], None, variant, 0.0, True, layer.first_key)
        assert lse is not None
        yield sequences[own], heads[own], out[:, 0], lse[:, 0]


def _attend_streaming(
    layer: EditedLayer, touched: Tensor, kind: StreamingKind
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Heads that only stream: the keys that they do not see are never read. Whole KV groups share their keys."""
    per_group = layer.q.shape[1] // layer.k.shape[1]
    by_heads: dict[tuple[int, ...], list[int]] = {}
    for sequence, row in enumerate(touched):
        by_heads.setdefault(tuple(row.nonzero()[:, 0].tolist()), []).append(sequence)
    for heads, sequences in by_heads.items():
        if not heads:
            continue
        at, of_sequences = torch.tensor(heads), torch.tensor(sequences)
        groups = at // per_group
        is_whole = len(heads) == per_group * len(set(groups.tolist()))
        keys = groups[::per_group] if is_whole else groups
        device = layer.q.device
        own, key_index, at_device = of_sequences.to(device), keys.to(device), at.to(device)
        sink = None if layer.variant.sink is None else layer.variant.sink[at_device]
        out, lse = streaming_attention(
            layer.q[own][:, at_device], layer.k[own][:, key_index], layer.v[own][:, key_index],
            replace(layer.variant, sink=sink), kind.sink, kind.recent, layer.first_key,
        )  # fmt: skip
        yield (
            of_sequences.repeat_interleave(len(at)),
            at.repeat(len(of_sequences)),
            out.flatten(0, 1),
            lse.flatten(0, 1),
        )


def _pairs_as_one_sequence(layer: EditedLayer, sequences: Tensor, heads: Tensor) -> EditedLayer:
    """Some heads of some sequences as the heads, with keys of their own, of a layer with one sequence."""
    per_group, device = layer.q.shape[1] // layer.k.shape[1], layer.q.device
    own, at, groups = sequences.to(device), heads.to(device), (heads // per_group).to(device)
    sink = None if layer.variant.sink is None else layer.variant.sink[at]
    return replace(
        layer,
        q=layer.q[own, at][None],
        k=layer.k[own, groups][None],
        v=layer.v[own, groups][None],
        variant=replace(layer.variant, sink=sink),
        logit_edits=[edit.at(sequences, heads).at(None) for edit in layer.logit_edits],  # type: ignore[arg-type]
        kv_groups=len(heads),
        head_numbers=heads,
    )


def outputs_of_record(record: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Outputs [H, Lq, dv] and log-sum-exp [H, Lq], float32, of all rows of a record, under its edits."""
    if not record.logit_edits:
        sizes = record.scaling, record.window, record.chunk_size, record.softcap, record.sink
        variant = AttentionVariant(*sizes, None if record.chosen is None else record.chosen.as_batch())
        out, lse = attend(record.q[None], record.k[None], record.v[None], None, variant, 0.0, True, record.first_key)
        assert lse is not None
        return out[0], lse[0]
    return outputs_at_rows(record, torch.arange(record.q.shape[1], device=record.q.device))[:2]


def outputs_at_rows(record: AttentionRecord, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [H, n, dv], float32, log-sum-exp [H, n], and whether they keep their weights, of rows [n] with edits."""
    elements = len(record.q) * record.k.shape[1]
    limit = LOGITS_PER_BLOCK if rows.device.type == "cpu" else LOGITS_PER_CUDA_BLOCK
    outs, sums, are_kept = [], [], []
    for block in torch.split(rows, max(2, limit // elements)):
        keys = record.visible_columns(block)
        logits, is_kept = edited_logits(record, block, keys)
        lse = log_sum(logits, record.sink)
        if record.replaces_weights:  # relative to the weights before
            lse = log_sum(record.without_patterns().masked_logits(block, keys), record.sink)
        weights = (logits - lse[..., None]).exp()
        values = record.v[:, keys].float()
        out = weights.view(len(values), -1, weights.shape[-1]) @ values
        outs.append(out.view(*weights.shape[:2], -1))
        sums.append(lse)
        are_kept.append(is_kept)
    return torch.cat(outs, 1), torch.cat(sums, 1), torch.cat(are_kept, 1)
