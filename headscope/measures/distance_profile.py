"""Mean contribution of each rotary pair to the logit by distance D = i - j, exact over all i, for log-spaced D.

If a model soft-caps its logits, contributions are to the logits before the cap.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.kernels.runtime import attempt, runs_kernels
from headscope.attention.record import AttentionRecord
from headscope.measures.rotary_pairs import planes_by_head, rotary_planes
from headscope.measures.row_sampling import (
    IntArray,
    count_visible_keys,
    items_per_tile,
    query_range,
    sums_beside,
    to_device,
    to_numpy,
)

DISTANCES_PER_OCTAVE = 4
UNITS_PER_CHUNK, DISTANCES_PER_CHUNK = 16, 8
"""Rotary planes of KV groups, and distances, whose shifted keys are in memory at once on a CPU."""


def log_spaced_distances(length: int) -> Tensor:
    """0 and the distinct integers nearest to 2^(m / 4), below `length`; int64, ascending."""
    steps = torch.arange(DISTANCES_PER_OCTAVE * length.bit_length() + 1) / DISTANCES_PER_OCTAVE
    spaced = (2.0**steps).round().long()
    distinct: Tensor = torch.unique(torch.cat((torch.zeros(1, dtype=torch.int64), spaced[spaced < length])))
    return distinct


def profile_sums(
    q: Tensor, k: Tensor, distances: Tensor | IntArray, visible_counts: Tensor | IntArray | None = None
) -> Tensor:
    """Sum over i of q_f(i) . k_f(i - D) for each distance D: [G x F, H / G, D], float32, unscaled.

    q [2, G x F, H / G, Lq] and k [2, G x F, 1, Lk] are rotary planes; the queries belong to the last keys.
    `visible_counts` [Lq] is the number of keys that each query sees, None for all up to its own. The sum is 0 for a
    distance that no query sees.
    """
    size = items_per_tile(q.device, UNITS_PER_CHUNK, q[:, 0].numel())
    units = zip(torch.split(q, size, 1), torch.split(k, size, 1), strict=True)
    sums = [_unit_profile_sums(*of_units, to_numpy(distances), visible_counts) for of_units in units]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _unit_profile_sums(q: Tensor, k: Tensor, distances: IntArray, visible_counts: Tensor | IntArray | None) -> Tensor:
    """`profile_sums` of some units."""
    units, _, count = q.shape[1:]
    query_positions = np.arange(k.shape[-1] - count, k.shape[-1])
    visible = query_positions + 1 if visible_counts is None else to_numpy(visible_counts)
    size = items_per_tile(q.device, DISTANCES_PER_CHUNK, 2 * units * count)
    shift_keys = _shift_keys_by_slices if q.device.type == "cpu" else _shift_keys_by_index
    sums = []
    for start in range(0, len(distances), size):
        shifted = shift_keys(k[:, :, 0], query_positions, distances[start : start + size], visible)
        sums.append(torch.bmm(q[0], shifted[0]) + torch.bmm(q[1], shifted[1]))
    return torch.cat(sums, -1)


def _shift_keys_by_slices(
    k: Tensor, query_positions: IntArray, distances: IntArray, visible_counts: IntArray
) -> Tensor:
    """The key at each distance before each query, 0 if not visible: [2, G x F, Lq, D]."""
    shifted = k.new_zeros(*k.shape[:2], len(distances), len(query_positions))
    for column, distance in enumerate(distances.tolist()):
        first = min(max(distance - int(query_positions[0]), 0), len(query_positions))
        shifted[:, :, column, first:] = k[
            ..., query_positions[0] + first - distance : query_positions[-1] + 1 - distance
        ]
        hidden = np.flatnonzero(visible_counts[first:] <= distance) + first
        if len(hidden):
            shifted[:, :, column, torch.from_numpy(hidden)] = 0
    return shifted.mT


def _shift_keys_by_index(k: Tensor, query_positions: IntArray, distances: IntArray, visible_counts: IntArray) -> Tensor:
    """`_shift_keys_by_slices` in a few GPU launches; several times slower on a CPU."""
    positions, visible = to_device(k.device, np.stack((query_positions, visible_counts)))[..., None]
    offsets = to_device(k.device, distances)
    keys = (positions - offsets).clamp_(min=0)
    shifted = k.index_select(-1, keys.flatten()).view(*k.shape[:2], *keys.shape)
    return shifted.masked_fill_(visible <= offsets, 0)


def _kernel_sums(record: AttentionRecord, geometry: Geometry, distances: IntArray) -> Tensor | None:
    """Sums at each distance by head, [H, F, D], from the GPU's kernel; None if it does not run."""
    if not runs_kernels(record):
        return None
    from headscope.attention.kernels.distance_sums import distance_sums

    return attempt(distance_sums, record, geometry, to_device(record.q.device, distances))


class DistanceProfile:
    """Accumulates distance profiles per layer and head over documents, in float64."""

    name = "distance"

    def __init__(self, geometry: Geometry, length: int):
        self.geometry = geometry
        self.length = length
        self.distances = log_spaced_distances(length).numpy()
        self.sums = torch.zeros(
            geometry.layers, geometry.heads, geometry.all_pairs, len(self.distances), dtype=torch.float64
        )
        self.counts = torch.zeros(geometry.layers, len(self.distances), dtype=torch.int64)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for a document, or for the next chunk of its queries."""
        geometry, queries = self.geometry.at_layer(record.layer), query_range(record)
        visible = count_visible_keys(record, np.arange(queries.start, queries.stop))
        sums = _kernel_sums(record, geometry, self.distances)
        if sums is None:
            q, k = rotary_planes(record.q, geometry), rotary_planes(record.k, geometry)
            by_unit = profile_sums(q, k, self.distances, visible).double()
            sums = torch.stack([planes_by_head(t, geometry) for t in by_unit.unbind(-1)], -1)
        self.sums = sums_beside(self.sums, sums)
        self.sums[record.layer, : geometry.heads, : geometry.all_pairs] += sums.to(self.sums.device) * record.scaling
        n_visible = len(visible) - np.searchsorted(np.sort(visible), self.distances, side="right")
        self.counts[record.layer] += torch.from_numpy(n_visible)

    def merge(self, other: "DistanceProfile") -> None:
        """Add the sums of another accumulator of the same shape."""
        self.sums = self.sums + other.sums.to(self.sums.device)
        self.counts += other.counts

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `distance` table without model and length. Distances without visible pairs are left out."""
        geometry, sums = self.geometry, self.sums.cpu()
        layer, head, pair, distance = torch.meshgrid(
            *(torch.arange(n) for n in (geometry.layers, geometry.heads, geometry.all_pairs, len(self.distances))),
            indexing="ij",
        )
        counts = self.counts[:, None, None].expand_as(sums)
        is_visible = (counts > 0) & geometry.has_pair(layer, head, pair)
        columns = {
            "layer": torch.tensor(geometry.layer_numbers)[layer[is_visible]],
            "head": head[is_visible],
            "kv_group": geometry.kv_group(layer[is_visible], head[is_visible]),
            "pair": pair[is_visible],
            "distance": torch.from_numpy(self.distances)[distance[is_visible]],
            "mean_signed": sums[is_visible] / counts[is_visible],
            "n": counts[is_visible],
        }
        return {name: column.numpy() for name, column in columns.items()}
