"""Each pair's mean contribution as a function of distance D = i - j, exact over all i, for log-spaced D.

Contributions are to the logits before their cap, where a model caps them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.heard import Attention
from headscope.measures.planes import by_head, planes

PER_OCTAVE = 4
DISTANCE_CHUNK = 8


def distances(length: int) -> Tensor:
    """0 and the distinct integers nearest to 2^(m / 4), below `length`; int64, ascending."""
    steps = torch.arange(PER_OCTAVE * length.bit_length() + 1) / PER_OCTAVE
    spaced = (2.0**steps).round().long()
    distinct: Tensor = torch.unique(torch.cat((torch.zeros(1, dtype=torch.int64), spaced[spaced < length])))
    return distinct


def profile_sums(q: Tensor, k: Tensor, at: Tensor, visible: Tensor | None = None) -> Tensor:
    """Sum over i of q_f(i) . k_f(i - D) for each D of `at`: [G x F, H / G, D], float32, unscaled.

    q [2, G x F, H / G, L] and k [2, G x F, 1, L] are planes, `visible` [L] the keys that each query sees, None for all
    up to its own; a distance that no query sees sums to 0.
    """
    length = q.shape[-1]
    sums = []
    for some in torch.split(at, DISTANCE_CHUNK):
        shifted = torch.zeros(2, q.shape[1], length, len(some), device=q.device)
        for column, distance in enumerate(some.tolist()):
            shifted[:, :, distance:, column] = k[:, :, 0, : length - distance]
            if visible is not None:
                shifted[:, :, visible <= distance, column] = 0
        sums.append(torch.bmm(q[0], shifted[0]) + torch.bmm(q[1], shifted[1]))
    return torch.cat(sums, -1)


class DistanceProfile:
    """Accumulates distance profiles per layer and head in float64, over every document that is given."""

    name = "distance"

    def __init__(self, geometry: Geometry, length: int):
        self.geometry = geometry
        self.length = length
        self.at = distances(length)
        self.sums = torch.zeros(geometry.layers, geometry.heads, geometry.all_pairs, len(self.at), dtype=torch.float64)
        self.counts = torch.zeros(geometry.layers, len(self.at), dtype=torch.int64)

    def update(self, heard: Attention) -> None:
        """Take one layer of one full pass (as many queries as keys)."""
        q, k = planes(heard.q, self.geometry), planes(heard.k, self.geometry)
        visible = None if heard.sees_all else heard.visible
        sums = profile_sums(q, k, self.at, visible).double().cpu() * heard.scaling
        counts = (heard.visible.cpu() > self.at[:, None]).sum(-1)
        self.sums[heard.layer] += torch.stack([by_head(t, self.geometry) for t in sums.unbind(-1)], -1)
        self.counts[heard.layer] += counts

    def merge(self, other: "DistanceProfile") -> None:
        """Add what another accumulator of the same shape has seen."""
        self.sums += other.sums
        self.counts += other.counts

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `distance` table without model and length; distances that no pair has are left out."""
        geometry = self.geometry
        layer, head, pair, at = torch.meshgrid(
            *(torch.arange(n) for n in (geometry.layers, geometry.heads, geometry.all_pairs, len(self.at))),
            indexing="ij",
        )
        counts = self.counts[:, None, None].expand_as(self.sums)
        kept = counts > 0
        columns = {
            "layer": torch.tensor(geometry.numbers)[layer[kept]],
            "head": head[kept],
            "kv_group": head[kept] // geometry.heads_per_group,
            "pair": pair[kept],
            "distance": self.at[at[kept]],
            "mean_signed": self.sums[kept] / counts[kept],
            "n": counts[kept],
        }
        return {name: column.numpy() for name, column in columns.items()}
