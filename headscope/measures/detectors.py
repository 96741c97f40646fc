"""Head detectors on a repeated random sequence: weights on five kinds of keys, exact, in O(L d).

The sequence is [prefix] r_1 .. r_m r_1 .. r_m. Each weight takes one logit and the row's log-sum-exp. Row i may attend
to its own token, the previous token, the first token and, in the second half, the same token in the first half (i - m)
or the token after that (i - m + 1).
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import IntArray, copy_together, count_visible_keys, to_device

ROWS_PER_CHUNK = 4096
"""Rows whose queries and keys are in memory at once."""
ROWS_PER_TILE = 64
"""The same where the logits of whole rows are needed, because they are edited."""
DETECTOR_KINDS = ("previous", "current", "first", "duplicate", "induction")
"""Kinds of keys, in the order of all results."""


def detector_rows_and_keys(kind: str, prefix_length: int, period: int) -> tuple[IntArray, IntArray]:
    """Rows with a key of this kind and these keys, in a prefix and a repeated sequence of `period` tokens."""
    tokens = np.arange(prefix_length + 2 * period)
    repeats = tokens[prefix_length + period :]
    return {
        "previous": (tokens[1:], tokens[1:] - 1),
        "current": (tokens, tokens),
        "first": (tokens, np.zeros_like(tokens)),
        "duplicate": (repeats, repeats - period),
        "induction": (repeats, repeats - period + 1),
    }[kind]


def attention_weights_at(record: AttentionRecord, rows: Tensor, keys: Tensor) -> Tensor:
    """Weight of row rows[n] on key keys[n], for every n: [H, n], float32, 0..1."""
    at_once = ROWS_PER_TILE if record.logit_edits else ROWS_PER_CHUNK
    weights = []
    for chunk_rows, chunk_keys in zip(torch.split(rows, at_once), torch.split(keys, at_once), strict=True):
        logits = record.logits_at(chunk_rows, chunk_keys[:, None])[..., 0]
        weights.append((logits - record.lse[:, chunk_rows]).exp().clamp(max=1))
    return torch.cat(weights, -1)


class DetectorScores:
    """Mean weight of every head on each kind of key in one sequence, over the rows that see such a key.

    If no row of a layer sees a kind (its window may be shorter than `period`), that layer has no row of this kind.
    """

    def __init__(self, geometry: Geometry, prefix_length: int, period: int):
        self.geometry, self.prefix_length, self.period = geometry, prefix_length, period
        self._scores: dict[tuple[int, str], tuple[Tensor, IntArray]] = {}  # scores of all heads, visible keys by row

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer of a full pass (as many queries as keys)."""
        visible, device = count_visible_keys(record, np.arange(record.q.shape[1])), record.q.device
        for kind in DETECTOR_KINDS:
            rows, keys = detector_rows_and_keys(kind, self.prefix_length, self.period)
            is_visible = rows - keys < visible[rows]
            rows, keys = rows[is_visible], keys[is_visible]
            if len(rows):
                weights = attention_weights_at(record, to_device(device, rows), to_device(device, keys))
                self._scores[record.layer, kind] = weights.double().mean(-1), visible[rows]

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns layer, head, kv_group, kind, score, chance (mean of 1 / visible keys) and rows (number of rows)."""
        columns: dict[str, list[object]] = {name: [] for name in _COLUMNS}
        for values in self._rows():
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
        return {name: np.array(column) for name, column in columns.items()}

    def _rows(self) -> Iterator[tuple[object, ...]]:
        places = sorted(self._scores)
        scores = copy_together([self._scores[place][0] for place in places])
        for (layer, kind), of_heads in zip(places, scores, strict=True):
            visible = self._scores[layer, kind][1]
            chance = float((1 / torch.from_numpy(visible).double()).mean())
            for head, score in enumerate(of_heads.tolist()):
                group = self.geometry.kv_group(layer, head)
                yield self.geometry.layer_numbers[layer], head, group, kind, score, chance, len(visible)


_COLUMNS = ("layer", "head", "kv_group", "kind", "score", "chance", "rows")
