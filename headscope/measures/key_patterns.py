"""Weights of heads on given keys of every query row: detection patterns of a prompt, as matrices [L, L].

The score of a pattern P, whose entries are from 0 to 1, is the weight that rows with such a key put on these keys:
sum_ij P_ij a_ij / sum_ij a_ij over rows i with a visible j where P_ij > 0. Without an excluded key every row of weights
sums to 1 (less with a learned sink, whose share counts as weight on no key), so that it is a mean over rows.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord, Geometry

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
    """Scores of every head for `patterns` [L, L] by kind, in one prompt; with `exclude_first`, key 0 does not count."""

    def __init__(self, geometry: Geometry, patterns: Mapping[str, Matrix], exclude_first: bool = False):
        self.geometry, self.first_key = geometry, int(exclude_first)
        self.patterns = {kind: torch.from_numpy(pattern) for kind, pattern in patterns.items()}
        self._rows: list[tuple[object, ...]] = []

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer of a full pass (as many queries as keys)."""
        length = record.q.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        visible = ((distance >= 0) & (distance < record.visible_counts.cpu()[:, None])).double()
        visible[:, : self.first_key] = 0
        patterns = {kind: pattern * visible for kind, pattern in self.patterns.items()}
        kept = {kind: pattern for kind, pattern in patterns.items() if pattern.any()}
        matched = {kind: torch.zeros(record.q.shape[0], dtype=torch.float64) for kind in kept}
        total = {kind: values.clone() for kind, values in matched.items()}
        for rows in torch.split(torch.arange(length), ROWS_PER_CHUNK):
            weights = record.weights(rows).double().cpu()
            # Of a row without exclusions the weight is 1, also where a learned sink takes a part of it.
            sums = weights[..., 1:].sum(-1) if self.first_key else torch.ones(weights.shape[:2], dtype=torch.float64)
            for kind, pattern in kept.items():
                matched[kind] += torch.einsum("hij,ij->h", weights, pattern[rows])
                total[kind] += sums[:, pattern[rows].any(1)].sum(1)
        counts = visible.sum(1)
        for kind, pattern in kept.items():
            in_mean = pattern.any(1)
            chance = _uniform_score(pattern[in_mean], counts[in_mean], record.visible_counts.cpu()[in_mean])
            scores = torch.where(total[kind] > 0, matched[kind] / total[kind], torch.zeros(())).clamp(0, 1)
            self._rows += self._head_rows(record.layer, kind, scores, chance, int(in_mean.sum()))

    def _head_rows(
        self, layer: int, kind: str, scores: Tensor, chance: float, rows: int
    ) -> Iterator[tuple[object, ...]]:
        for head, score in enumerate(scores.tolist()):
            group = self.geometry.kv_group(layer, head)
            yield self.geometry.layer_numbers[layer], head, group, kind, score, chance, rows

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, kind, score, chance and rows, as of `DetectorScores`."""
        names = ("layer", "head", "kv_group", "kind", "score", "chance", "rows")
        order = sorted(range(len(self._rows)), key=lambda index: self._rows[index][:2])
        return {name: np.array([self._rows[index][n] for index in order]) for n, name in enumerate(names)}


def _uniform_score(pattern: Tensor, counted: Tensor, visible: Tensor) -> float:
    """The score of uniform weights 1 / visible, for rows of a pattern of which `counted` keys count."""
    weight = 1 / visible.double()
    return float((pattern.sum(1) * weight).sum() / (counted * weight).sum())
