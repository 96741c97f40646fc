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

ROWS = 4096
"""Rows whose queries and keys are held at once."""
KINDS = ("previous", "current", "first", "duplicate", "induction")
"""What a row may look at; the order of everything that is told of them."""


def looked_at(kind: str, opening: int, period: int) -> tuple[Tensor, Tensor]:
    """The rows that have such a key, and that key of each, in `opening` tokens and twice `period` more; int64."""
    every = torch.arange(opening + 2 * period)
    again = every[opening + period :]
    return {
        "previous": (every[1:], every[1:] - 1),
        "current": (every, every),
        "first": (every, torch.zeros_like(every)),
        "duplicate": (again, again - period),
        "induction": (again, again - period + 1),
    }[kind]


def weights_on(heard: AttentionRecord, rows: Tensor, keys: Tensor) -> Tensor:
    """The weight of row rows[n] on key keys[n], for every n: [H, n], float32, 0..1."""
    groups, _, dim = heard.k.shape
    weights = []
    for some, their in zip(torch.split(rows, ROWS), torch.split(keys, ROWS), strict=True):
        q = heard.q[:, some].float().view(groups, -1, len(some), dim)
        logits = heard.capped((q * heard.k[:, None, their].float()).sum(-1).flatten(0, 1) * heard.scaling)
        weights.append((logits - heard.lse[:, some]).exp().clamp(max=1))
    return torch.cat(weights, -1)


class Detectors:
    """The mean weight of every head on each kind of key, in one sequence, over the rows that see such a key.

    A kind that no row of a layer sees, as where its window is shorter than `period`, is left out there.
    """

    def __init__(self, geometry: Geometry, opening: int, period: int):
        self.geometry, self.opening, self.period = geometry, opening, period
        self._found: dict[tuple[int, str], tuple[Tensor, float, int]] = {}

    def update(self, heard: AttentionRecord) -> None:
        """Take one layer of one full pass (as many queries as keys)."""
        visible = heard.visible
        for kind in KINDS:
            rows, keys = (each.to(visible.device) for each in looked_at(kind, self.opening, self.period))
            seen = rows - keys < visible[rows]
            rows, keys = rows[seen], keys[seen]
            if len(rows):
                score = weights_on(heard, rows, keys).double().mean(-1).cpu()
                chance = float((1 / visible[rows].double()).mean())
                self._found[heard.layer, kind] = score, chance, len(rows)

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, kind, score, chance (mean of 1 / visible keys) and rows (how many)."""
        columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
        for values in self._rows():
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return {name: np.array(column) for name, column in columns.items()}

    def _rows(self) -> Iterator[tuple[object, ...]]:
        for (layer, kind), (scores, chance, rows) in sorted(self._found.items()):
            for head, score in enumerate(scores.tolist()):
                group = head // self.geometry.heads_per_group
                yield self.geometry.numbers[layer], head, group, kind, score, chance, rows


_COLUMNS = ("layer", "head", "kv_group", "kind", "score", "chance", "rows")
