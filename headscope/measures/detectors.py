"""Which key a head looks at on random tokens that come twice: exact, from one logit a row and the row's log-sum-exp.

On [opening] r_1 .. r_m r_1 .. r_m a row i can look at its own token, the one before, the first of all and, in the
second half, at the same token in the first (i - m) or at the one that followed it there (i - m + 1). O(L d) in all.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord

ROWS_PER_CHUNK = 4096
"""Rows whose queries and keys are held at once."""
DETECTOR_KINDS = ("previous", "current", "first", "duplicate", "induction")
"""What a row may look at; the order of everything that is told of them."""


def detector_rows_and_keys(kind: str, prefix_length: int, period: int) -> tuple[Tensor, Tensor]:
    """The rows that have such a key, and that key of each, in `opening` tokens and twice `period` more; int64."""
    every = torch.arange(prefix_length + 2 * period)
    again = every[prefix_length + period :]
    return {
        "previous": (every[1:], every[1:] - 1),
        "current": (every, every),
        "first": (every, torch.zeros_like(every)),
        "duplicate": (again, again - period),
        "induction": (again, again - period + 1),
    }[kind]


def attention_weights_at(record: AttentionRecord, rows: Tensor, keys: Tensor) -> Tensor:
    """The weight of row rows[n] on key keys[n], for every n: [H, n], float32, 0..1."""
    groups, _, dim = record.k.shape
    weights = []
    for some, their in zip(torch.split(rows, ROWS_PER_CHUNK), torch.split(keys, ROWS_PER_CHUNK), strict=True):
        q = record.q[:, some].float().view(groups, -1, len(some), dim)
        logits = record.soft_cap((q * record.k[:, None, their].float()).sum(-1).flatten(0, 1) * record.scaling)
        weights.append((logits - record.lse[:, some]).exp().clamp(max=1))
    return torch.cat(weights, -1)


class DetectorScores:
    """The mean weight of every head on each kind of key, in one sequence, over the rows that see such a key.

    A kind that no row of a layer sees, as where its window is shorter than `period`, is left out there.
    """

    def __init__(self, geometry: Geometry, prefix_length: int, period: int):
        self.geometry, self.prefix_length, self.period = geometry, prefix_length, period
        self._scores: dict[tuple[int, str], tuple[Tensor, float, int]] = {}

    def update(self, record: AttentionRecord) -> None:
        """Take one layer of one full pass (as many queries as keys)."""
        visible = record.visible_counts
        for kind in DETECTOR_KINDS:
            rows, keys = (
                each.to(visible.device) for each in detector_rows_and_keys(kind, self.prefix_length, self.period)
            )
            seen = rows - keys < visible[rows]
            rows, keys = rows[seen], keys[seen]
            if len(rows):
                score = attention_weights_at(record, rows, keys).double().mean(-1).cpu()
                chance = float((1 / visible[rows].double()).mean())
                self._scores[record.layer, kind] = score, chance, len(rows)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, kind, score, chance (mean of 1 / visible keys) and rows (how many)."""
        columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
        for values in self._rows():
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return {name: np.array(column) for name, column in columns.items()}

    def _rows(self) -> Iterator[tuple[object, ...]]:
        for (layer, kind), (scores, chance, rows) in sorted(self._scores.items()):
            for head, score in enumerate(scores.tolist()):
                group = head // self.geometry.heads_per_group
                yield self.geometry.layer_numbers[layer], head, group, kind, score, chance, rows


_COLUMNS = ("layer", "head", "kv_group", "kind", "score", "chance", "rows")
