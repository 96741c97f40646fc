"""Positional preference of heads: the logit of the mean query with the mean key, by distance.

q and k are rotated back to position 0 and averaged over the tokens of a text; the first token is left out, because an
attention sink's key is unlike all others [ours]. The two means, rotated to distance D, give the logit that a head has
whatever the tokens are.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord, soft_cap
from headscope.measures.circuits import positional_effective_length, positional_logits
from headscope.measures.distance_profile import log_spaced_distances
from headscope.measures.rotary_pairs import rotary_planes
from headscope.measures.row_sampling import query_range

FIRST_TOKEN = 1
"""The first token whose query and key count."""
ROWS_PER_CHUNK = 4096
"""Distances whose logits are computed at once."""


class PositionalPreference:
    """Accumulates the mean query and mean key of every head of a text of `length` tokens.

    `theta(layer)` are the frequencies [1|G, P] of the scheme that is attached.
    """

    def __init__(self, geometry: Geometry, length: int, theta: Callable[[int], Tensor]):
        self.geometry, self.length, self.theta = geometry, length, theta
        self.distances = log_spaced_distances(length)
        self._query_sums: dict[int, Tensor] = {}
        self._key_sums: dict[int, Tensor] = {}
        self._scalings: dict[int, float] = {}
        self._soft_caps: dict[int, float | None] = {}
        self._visible: dict[int, int] = {}
        self.has_key_bias = False

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer for the text, or for the next chunk of its queries."""
        layer, geometry = record.layer, self.geometry.at_layer(record.layer)
        self.has_key_bias |= record.q.shape[-1] > geometry.head_dim
        positions = record.query_key_index + record.first_key
        new_keys = record.k[:, -len(positions) :]
        unused = max(0, FIRST_TOKEN - query_range(record).start)
        theta = self._pair_frequencies(layer)
        angles = (
            without_waiting(positions.device, theta)[..., None] * positions.float()
        )  # float32, as in the model's tables
        turns = torch.polar(torch.ones_like(angles, dtype=torch.float64), -angles.double())
        for sums, vectors in ((self._query_sums, record.q), (self._key_sums, new_keys)):
            planes = rotary_planes(vectors, geometry).double()  # [2, G x F, heads of a group, L]
            unrotated = torch.complex(planes[0], planes[1]) * turns.view(-1, 1, len(positions))
            total = unrotated[..., unused:].sum(-1).view(geometry.kv_groups, geometry.all_pairs, -1).transpose(1, 2)
            sums[layer] = sums.get(layer, 0) + total.reshape(-1, geometry.all_pairs)
        self._scalings[layer], self._soft_caps[layer] = record.scaling, record.softcap
        self._visible[layer] = min(filter(None, (self.length, record.window, record.chunk_size)))

    def _pair_frequencies(self, layer: int) -> Tensor:
        """Signed frequencies of all pairs of a layer, [G, F], 0 for unrotated ones."""
        geometry = self.geometry.at_layer(layer)
        if not self.geometry.layer_rotates[layer]:
            return torch.zeros(geometry.kv_groups, geometry.all_pairs)
        theta = geometry.rotation_direction * self.theta(layer).detach().float()
        rotating = theta.expand(geometry.kv_groups, -1)
        return torch.nn.functional.pad(rotating, (0, geometry.all_pairs - theta.shape[1]))

    def pair_products(self, layer: int) -> Tensor:
        """Mean query times conjugate mean key of each pair, complex, in logit units: [H, F]."""
        count = self.length - FIRST_TOKEN
        keys = self._key_sums[layer].repeat_interleave(self.geometry.heads_per_group(layer), 0)
        return (self._scalings[layer] / count**2 * self._query_sums[layer] * keys.conj()).cpu()

    def logits(self, layer: int, distances: Tensor) -> Tensor:
        """Logit of the mean query with the mean key at distances [n]: [H, n], after the layer's soft cap."""
        theta = self._pair_frequencies(layer).cpu().repeat_interleave(self.geometry.heads_per_group(layer), 0)
        products = self.pair_products(layer)
        linear = [positional_logits(products, theta, part) for part in torch.split(distances, ROWS_PER_CHUNK)]
        return soft_cap(torch.cat(linear, -1), self._soft_caps[layer])

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the positional logit curve; distances beyond a layer's window or chunk are left out."""
        columns: dict[str, list[Tensor]] = {name: [] for name in ("layer", "head", "kv_group", "distance", "logit")}
        for layer, number in enumerate(self.geometry.layer_numbers):
            distances = self.distances[self.distances < self._visible[layer]]
            logits = self.logits(layer, distances)
            head = torch.arange(len(logits))[:, None].expand(logits.shape)
            columns["layer"].append(torch.full(logits.shape, number).flatten())
            columns["head"].append(head.flatten())
            columns["kv_group"].append((head // self.geometry.heads_per_group(layer)).flatten())
            columns["distance"].append(distances.expand(logits.shape).flatten())
            columns["logit"].append(logits.flatten())
        return {name: torch.cat(parts).numpy() for name, parts in columns.items()}

    def summarise(self) -> Mapping[str, np.ndarray]:
        """Summary of the positional logit curve, from all distances at which a query sees keys."""
        columns: dict[str, list[Tensor]] = {
            name: [] for name in ("layer", "head", "kv_group", "effective_length", "preferred_distance", "spread")
        }
        for layer, number in enumerate(self.geometry.layer_numbers):
            logits = self.logits(layer, torch.arange(self._visible[layer]))
            head = torch.arange(len(logits))
            columns["layer"].append(torch.full((len(logits),), number))
            columns["head"].append(head)
            columns["kv_group"].append(head // self.geometry.heads_per_group(layer))
            columns["effective_length"].append(positional_effective_length(logits))
            columns["preferred_distance"].append(logits.argmax(-1))
            columns["spread"].append(logits.amax(-1) - logits.amin(-1))
        return {name: torch.cat(parts).numpy() for name, parts in columns.items()}
