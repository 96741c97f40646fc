"""Effective length, shape and learned-sink weight of attention rows, streamed without an L x L matrix.

ln ESS_2 = 2 lse(s) - lse(2 s) = -ln sum_j alpha_ij^2 (paper: section on AdaScale; appendix on effective sequence
length). The sums over a row's keys come from the sweep that computed the output, if the record has them. Otherwise rows
are visited in cache-sized tiles, with the log-sum-exp of the fused kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from headscope.attention.kernels.runtime import attempt, runs_kernels
from headscope.attention.record import LOCAL_DISTANCE, MASKED_LOGIT, AttentionRecord, RowSums
from headscope.errors import BadInput
from headscope.measures.binned_means import BinnedRowMeans
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    items_per_tile,
    query_range,
    to_device,
    to_numpy,
)

ROW_FORMULAS: Mapping[str, Callable[[RowSums, Tensor], Tensor]] = MappingProxyType(
    {
        "ess2": lambda sums, _: (-sums.squares.log()).clamp(min=0).exp(),
        "log_ess2": lambda sums, _: (-sums.squares.log()).clamp(min=0),
        "ess1": lambda sums, _: (-sums.neg_entropy).clamp(min=0).exp(),
        "max_weight": lambda sums, _: sums.max_weight.clamp(max=1),
        "sink_mass": lambda sums, _: sums.first_weight.clamp(max=1),
        "local_mass": lambda sums, _: sums.local_weight.clamp(max=1),
        "mean_distance": lambda sums, _: sums.distance.clamp(min=0),
    }
)
"""Each statistic of rows [H, rows], from their sums and the positions of their queries in the sequence [rows]."""
ROW_STATISTICS = tuple(ROW_FORMULAS)
ROW_TILE, KEY_TILE = 16, 512
"""Rows and keys of a tile. Few rows: those of a log-spaced sample see very different numbers of keys."""


def row_statistics(record: AttentionRecord, rows: Tensor | IntArray) -> Tensor:
    """Statistics of query rows, [len(ROW_STATISTICS), H, rows], float32, in the order of `ROW_STATISTICS`.

    Ranges: 1 <= ess2 <= ess1 <= visible keys; weights in [0, 1]; mean_distance in tokens, >= 0. `rows` are indices of
    the record's queries, ascending. Accumulated in log-space relative to the row's log-sum-exp, in float32.

    A learned sink takes its share of every row. `max_weight`, `sink_mass` (of key 0) and `local_mass` are weights in
    the whole row. Effective lengths and distances use the weights of the keys alone, renormalized to 1. Otherwise a
    head that gives nearly all weight to its sink would seem to attend to more keys than there are.
    """
    indices = to_numpy(rows)
    count = record.q.shape[1]
    is_every_row = len(indices) == count and (np.diff(indices) == 1).all()
    row_index = torch.arange(count, device=record.q.device) if is_every_row else _on_device(record, indices)
    if record.row_sums is not None:
        sums = record.row_sums if is_every_row else record.row_sums.at_rows(row_index)
    else:
        sums = _kernel_sums(record, row_index) or _joined(_tiles(record, indices))
    start = query_range(record).start
    values = statistics_of_sums(sums, row_index + start)
    # Exactly 1: the order of heads whose rows see local keys only would otherwise depend on the machine's rounding.
    is_local = count_visible_keys(record, indices + start) <= LOCAL_DISTANCE
    if is_local.any() and record.sink is None and not record.logit_edits:
        values[ROW_STATISTICS.index("local_mass")].masked_fill_(to_device(values.device, is_local), 1)
    return values


def with_row_sums(record: AttentionRecord) -> AttentionRecord:
    """The record with the sums of all its rows, computed here if the backend did not."""
    if record.row_sums is not None:
        return record
    sums = _kernel_sums(record)
    return replace(record, row_sums=sums or _joined(_tiles(record, np.arange(record.q.shape[1]))))


def statistics_of_sums(sums: RowSums, positions: Tensor) -> Tensor:
    """Statistics [len(ROW_STATISTICS), H, rows] of rows whose queries have these positions [rows]."""
    return torch.stack([formula(sums, positions) for formula in ROW_FORMULAS.values()])


def _kernel_sums(record: AttentionRecord, rows: Tensor | None = None) -> RowSums | None:
    """Sums of query rows, by default of all, from the GPU's kernel; None where it does not run."""
    if not runs_kernels(record):
        return None
    from headscope.attention.kernels.row_sums import row_sums

    return attempt(row_sums, record, rows)


def _on_device(record: AttentionRecord, indices: IntArray) -> Tensor:
    return to_device(record.q.device, indices)


def _tiles(record: AttentionRecord, indices: IntArray) -> list[RowSums]:
    """Sums of query rows, tile by tile."""
    size = items_per_tile(record.q.device, ROW_TILE, record.q.shape[0] * record.k.shape[1])
    return [_tile_sums(record, indices[start : start + size]) for start in range(0, len(indices), size)]


def _joined(tiles: Sequence[RowSums]) -> RowSums:
    """The sums of the rows of all tiles."""
    return RowSums(*(torch.cat(parts, -1) for parts in zip(*(vars(tile).values() for tile in tiles), strict=True)))


def _tile_sums(record: AttentionRecord, row_indices: IntArray) -> RowSums:
    """Sums of one tile of rows, in one sweep over their keys."""
    (heads, count, _), keys = record.q.shape, record.k.shape[1]
    shape = (heads, len(row_indices))
    device, own_keys = record.q.device, row_indices + keys - count
    visible_counts = count_visible_keys(record, row_indices + query_range(record).start)
    first, last = int(own_keys[0] - visible_counts[0]) + 1, int(own_keys[-1])
    rows, own_key_index = to_device(device, np.stack((row_indices, own_keys)))
    lse = record.lse[:, rows, None].float()
    largest = torch.full(shape, MASKED_LOGIT, device=device)
    squares, neg_entropy, sink, key_mass = (torch.zeros(shape, device=device) for _ in range(4))
    distance_and_local = torch.zeros(shape[1], shape[0], 2, device=device)
    size = items_per_tile(device, KEY_TILE, heads * len(row_indices))
    needs_mass = record.sink is not None or len(record.logit_edits) > 0
    for start in range(first, last + 1, size):
        stop = min(start + size, last + 1)
        log_weight = (record.masked_logits(rows, slice(start, stop)) - lse).clamp_(min=MASKED_LOGIT)
        distance = own_key_index[:, None] - torch.arange(start, stop, device=device)
        weight = log_weight.exp()
        largest = torch.maximum(largest, log_weight.amax(-1))
        squares += torch.linalg.vecdot(weight, weight)
        neg_entropy += torch.linalg.vecdot(weight, log_weight)
        if needs_mass:
            key_mass += weight.sum(-1)
        # Distances, not key indices: far from the start, a mean index minus the row's own index would lose precision.
        key_values = torch.stack((distance.float(), (distance < LOCAL_DISTANCE).float()), -1)
        distance_and_local += torch.bmm(weight.transpose(0, 1), key_values)
        if start == 0 and record.first_key == 0:
            sink = weight[..., 0].clone()
    mean_distance, local = distance_and_local.permute(2, 1, 0)
    if needs_mass:
        _refuse_rows_without_keys(record, key_mass)
        squares, mean_distance = squares / key_mass**2, mean_distance / key_mass
        neg_entropy = neg_entropy / key_mass - key_mass.log()
    max_logit = largest + record.lse[:, rows]
    return RowSums(max_logit, largest.exp(), sink, local, squares, neg_entropy, mean_distance)


def _refuse_rows_without_keys(record: AttentionRecord, key_mass: Tensor) -> None:
    """Raise BadInput if edits of logits leave a row no key: it has no effective length."""
    if record.logit_edits and bool((key_mass == 0).any()):
        names = ", ".join(sorted({edit.kind.name for edit in record.logit_edits}))
        raise BadInput(
            f"rows of attention layer {record.layer} attend to no key under {names}, so that they have no effective "
            "length. Measure without this context, or leave keys to every row"
        )


class AttentionRows(BinnedRowMeans):
    """Means of `row_statistics`: the `attention` table."""

    name = "attention"
    statistic_names = ROW_STATISTICS
    sink_statistics = frozenset({"sink_mass"})

    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor:
        return row_statistics(record, rows)


class LearnedSink(BinnedRowMeans):
    """Mean weight of learned sinks (gpt-oss, Granite): the `learned_sink` table, empty if no layer has one."""

    name = "learned_sink"
    statistic_names = ("share",)

    def row_values(self, record: AttentionRecord, rows: IntArray) -> Tensor | None:
        shares = record.sink_weight
        return None if shares is None else shares.index_select(1, to_device(shares.device, rows))[None]
