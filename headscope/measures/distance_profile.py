"""Each pair's mean contribution as a function of distance D = i - j, exact over all i, for log-spaced D.

Contributions are to the logits before their cap, where a model caps them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.rotary_planes import planes_by_head, rotary_planes
from headscope.measures.row_sampling import IntArray, count_visible_keys, query_range, to_device, to_numpy
from headscope.measures.tiles import items_per_tile

DISTANCES_PER_OCTAVE = 4
DISTANCES_PER_CHUNK = 8


def log_spaced_distances(length: int) -> Tensor:
    """0 and the distinct integers nearest to 2^(m / 4), below `length`; int64, ascending."""
    steps = torch.arange(DISTANCES_PER_OCTAVE * length.bit_length() + 1) / DISTANCES_PER_OCTAVE
    spaced = (2.0**steps).round().long()
    distinct: Tensor = torch.unique(torch.cat((torch.zeros(1, dtype=torch.int64), spaced[spaced < length])))
    return distinct


def profile_sums(
    q: Tensor, k: Tensor, distances: Tensor | IntArray, visible_counts: Tensor | IntArray | None = None
) -> Tensor:
    """Sum over i of q_f(i) . k_f(i - D) for each D of `at`: [G x F, H / G, D], float32, unscaled.

    q [2, G x F, H / G, Lq] and k [2, G x F, 1, Lk] are planes, the queries the last of the keys; `visible` [Lq] how
    many keys each query sees, None for all up to its own. A distance that no query sees sums to 0.
    """
    (units, _, count), far = q.shape[1:], to_numpy(distances)
    own = np.arange(k.shape[-1] - count, k.shape[-1])
    seen = own + 1 if visible_counts is None else to_numpy(visible_counts)
    size = items_per_tile(q.device, DISTANCES_PER_CHUNK, 2 * units * count)
    sums = []
    for some in (far[first : first + size] for first in range(0, len(far), size)):
        shifted = (_shift_keys_by_slices if q.device.type == "cpu" else _shift_keys_by_index)(
            k[:, :, 0], own, some, seen
        )
        sums.append(torch.bmm(q[0], shifted[0]) + torch.bmm(q[1], shifted[1]))
    return torch.cat(sums, -1)


def _shift_keys_by_slices(
    k: Tensor, query_positions: IntArray, distances: IntArray, visible_counts: IntArray
) -> Tensor:
    """The key that many before each query's own, 0 where it is not seen, [2, G x F, Lq, D], from runs of keys."""
    shifted = k.new_zeros(*k.shape[:2], len(query_positions), len(distances))
    for column, distance in enumerate(distances.tolist()):
        first = min(max(distance - int(query_positions[0]), 0), len(query_positions))
        shifted[:, :, first:, column] = k[
            ..., query_positions[0] + first - distance : query_positions[-1] + 1 - distance
        ]
        hidden = np.flatnonzero(visible_counts[first:] <= distance) + first
        if len(hidden):
            shifted[:, :, torch.from_numpy(hidden), column] = 0
    return shifted


def _shift_keys_by_index(k: Tensor, query_positions: IntArray, distances: IntArray, visible_counts: IntArray) -> Tensor:
    """As `_copied`, in a few launches, which a CPU takes several times as long for."""
    (where, least), at = (
        to_device(k.device, np.stack((query_positions, visible_counts)))[..., None],
        to_device(k.device, distances),
    )
    places = (where - at).clamp_(min=0)
    shifted = k.index_select(-1, places.flatten()).view(*k.shape[:2], *places.shape)
    return shifted.masked_fill_(least <= at, 0)


class DistanceProfile:
    """Accumulates distance profiles per layer and head in float64, over every document that is given."""

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
        """Take what a layer computed for a document, or for the next chunk of its queries."""
        q, k = rotary_planes(record.q, self.geometry), rotary_planes(record.k, self.geometry)
        here = query_range(record)
        visible = count_visible_keys(record, np.arange(here.start, here.stop))
        sums = profile_sums(q, k, self.distances, visible).double().cpu() * record.scaling
        self.sums[record.layer] += torch.stack([planes_by_head(t, self.geometry) for t in sums.unbind(-1)], -1)
        self.counts[record.layer] += torch.from_numpy((visible > self.distances[:, None]).sum(-1))

    def merge(self, other: "DistanceProfile") -> None:
        """Add what another accumulator of the same shape has seen."""
        self.sums += other.sums
        self.counts += other.counts

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `distance` table without model and length; distances that no pair has are left out."""
        geometry = self.geometry
        layer, head, pair, at = torch.meshgrid(
            *(torch.arange(n) for n in (geometry.layers, geometry.heads, geometry.all_pairs, len(self.distances))),
            indexing="ij",
        )
        counts = self.counts[:, None, None].expand_as(self.sums)
        kept = counts > 0
        columns = {
            "layer": torch.tensor(geometry.layer_numbers)[layer[kept]],
            "head": head[kept],
            "kv_group": head[kept] // geometry.heads_per_group,
            "pair": pair[kept],
            "distance": torch.from_numpy(self.distances)[at[kept]],
            "mean_signed": self.sums[kept] / counts[kept],
            "n": counts[kept],
        }
        return {name: column.numpy() for name, column in columns.items()}
