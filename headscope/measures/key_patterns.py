"""Weights of heads on given keys of every query row: detection patterns of a prompt, as matrices [L, L].

The score of a pattern P, whose entries are from 0 to 1, is the weight that rows with such a key put on these keys:
sum_ij P_ij a_ij / sum_ij a_ij over rows i with a visible j where P_ij > 0. Without an excluded key every row of weights
sums to 1 (less with a learned sink, whose share counts as weight on no key), so that it is a mean over rows.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import copy_together

ROWS_PER_CHUNK = 256
"""Rows whose weights are in memory at once."""

Matrix = npt.NDArray[np.float64]


def token_patterns(ids: npt.NDArray[np.int64]) -> dict[str, Matrix]:
    """The patterns [L, L] of the five kinds of keys in a prompt.

    duplicate: every earlier copy of the query's token; induction: the token after every such copy.
    """
    count = len(ids)
    duplicate = np.tril(ids[:, None] == ids[None], -1).astype(np.float64)
    induction = np.zeros((count, count))
    induction[:, 1:] = duplicate[:, :-1]
    first = np.zeros((count, count))
    first[:, 0] = 1
    return {
        "previous": np.eye(count, k=-1),
        "current": np.eye(count),
        "first": first,
        "duplicate": duplicate,
        "induction": induction,
    }


class PatternScores:
    """Scores of every head for `patterns` [L, L] by kind, in one prompt; with `exclude_first`, key 0 does not count.

    Scores stay on the device of their layer until `compute`.
    """

    def __init__(self, geometry: Geometry, patterns: Mapping[str, Matrix], exclude_first: bool = False):
        self.geometry, self.first_key = geometry, int(exclude_first)
        self.kinds, self.patterns = [*patterns], torch.from_numpy(np.stack([*patterns.values()]))
        self._on_device: dict[torch.device, Tensor] = {}
        self._scores: dict[int, Tensor] = {}

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer of a full pass (as many queries as keys)."""
        device = record.q.device
        if device not in self._on_device:
            self._on_device[device] = without_waiting(device, self.patterns)
        positions = torch.arange(record.q.shape[1], device=device)
        distance = positions[:, None] - positions
        visible = ((distance >= 0) & (distance < record.visible_counts[:, None])).double()
        visible[:, : self.first_key] = 0
        patterns = self._on_device[device] * visible
        in_mean = patterns.any(2).double()
        matched = patterns.new_zeros(len(patterns), record.q.shape[0])
        total = matched.clone()
        for rows in torch.split(positions, ROWS_PER_CHUNK):
            weights = record.weights(rows).double()
            # Of a row without exclusions the weight is 1, also where a learned sink takes a part of it.
            sums = weights[..., 1:].sum(-1) if self.first_key else torch.ones_like(weights[..., 0])
            matched += torch.einsum("hij,kij->kh", weights, patterns[:, rows])
            total += in_mean[:, rows] @ sums.T
        scores = torch.where(total > 0, matched / total, 0.0).clamp(0, 1)
        # The score of uniform weights; NaN for a pattern without a visible key.
        uniform = 1 / record.visible_counts.double()
        chance = (patterns.sum(2) @ uniform) / (in_mean @ (visible.sum(1) * uniform))
        self._scores[record.layer] = torch.cat([scores, chance[:, None], in_mean.sum(1, keepdim=True)], 1)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, kind, score, chance and rows, as of `DetectorScores`; a kind of which a layer
        sees no key has no row."""
        layers = sorted(self._scores)
        on_cpu = copy_together([self._scores[layer].flatten() for layer in layers])
        rows: list[tuple[object, ...]] = []
        for layer, flat in zip(layers, on_cpu, strict=True):
            by_kind = flat.view(len(self.kinds), -1).tolist()
            for head in range(len(by_kind[0]) - 2):
                place = self.geometry.layer_numbers[layer], head, self.geometry.kv_group(layer, head)
                rows += [
                    (*place, kind, float(values[head]), float(values[-2]), int(values[-1]))
                    for kind, values in zip(self.kinds, by_kind, strict=True)
                    if values[-1] > 0
                ]
        names = ("layer", "head", "kv_group", "kind", "score", "chance", "rows")
        return {name: np.array([row[n] for row in rows]) for n, name in enumerate(names)}
