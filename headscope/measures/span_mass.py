"""Attention mass between spans of a text, streamed: mean weight of the rows of one span on the keys of another.

mass(A, B) = mean over the query rows i of A that see a key of B of the sum of alpha_ij over the visible keys j in B.
chance(A, B) is the same with uniform weights over the visible keys of the layer (window, chunk). The sums are further
dimensions of the values in the attention kernel, or per block of rows one product of the weights with a keys x spans
indicator: memory is O(L).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import (
    IntArray,
    copy_together,
    count_visible_keys,
    items_per_tile,
    query_range,
    rows_in_chunk,
    to_device,
    visible_keys,
)

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
LOGITS_PER_TILE = 2**21
"""Logits in memory at once on a CPU."""


@dataclass(frozen=True, eq=False)
class SpanLayout:
    """Spans of a text of L tokens: `queries` and `keys` [spans, L] say which tokens are in each. Spans may overlap.

    Two further kinds of keys depend on the query and follow the spans: with `tokens` [L] (token ids), earlier tokens
    with the id of the query; with `matching` [L], the one key of each query, -1 for none.
    """

    queries: BoolArray
    keys: BoolArray
    tokens: IntArray | None = None
    matching: IntArray | None = None

    @property
    def key_count(self) -> int:
        """Number of kinds of keys."""
        return len(self.keys) + (self.tokens is not None) + (self.matching is not None)

    def visible_span_keys(self, window: int | None, chunk_size: int | None) -> tuple[IntArray, IntArray]:
        """Number of keys of each kind that every row sees, [kinds, L], and of all keys, [L]."""
        rows = np.arange(self.keys.shape[1])
        visible = visible_keys(rows, window, chunk_size)
        low = rows + 1 - visible
        sums = np.concatenate([np.zeros((len(self.keys), 1), np.int64), self.keys.cumsum(1)], 1)
        counts = [sums[:, 1:] - sums[:, low]]
        if self.tokens is not None:
            counts.append(_count_earlier_copies(self.tokens, low)[None])
        if self.matching is not None:
            counts.append((self.matching >= low).astype(np.int64)[None])
        return np.concatenate(counts), visible


def _count_earlier_copies(tokens: IntArray, low: IntArray) -> IntArray:
    """For each row i the number of positions from low[i] to i - 1 with the same token."""
    counts = np.zeros(len(tokens), np.int64)
    order = np.argsort(tokens, kind="stable")
    for positions in np.split(order, np.flatnonzero(np.diff(tokens[order])) + 1):
        counts[positions] = np.arange(len(positions)) - np.searchsorted(positions, low[positions])
    return counts


def weight_tiles(record: AttentionRecord, rows: IntArray) -> Iterator[tuple[IntArray, int, Tensor]]:
    """Weights of those of these rows (of the document, sorted) that are queries of the record, in tiles.

    Yields rows of the document [n], the first key of the document in the tile, and weights [H, n, keys], float32.
    """
    offset, (heads, keys) = query_range(record).start, (len(record.q), record.k.shape[1])
    indices = rows_in_chunk(rows, record)
    size = items_per_tile(record.q.device, max(1, LOGITS_PER_TILE // (heads * keys)), heads * keys)
    for start in range(0, len(indices), size):
        tile = indices[start : start + size]
        yield tile + offset, *row_weights(record, tile)


def row_weights(record: AttentionRecord, indices: IntArray) -> tuple[int, Tensor]:
    """Weights [H, n, keys] of queries of the record, given by index, ascending, float32.

    The keys are those from the first that any of these rows sees, whose number in the document comes first, to the own
    key of the last row; memory is O(n x H x keys).
    """
    first, logits = row_logits(record, indices)
    return first, logits.sub_(record.lse[:, to_device(record.q.device, indices), None]).exp_()


def row_logits(record: AttentionRecord, indices: IntArray) -> tuple[int, Tensor]:
    """The logits of `row_weights`, -inf for keys that a row does not see."""
    own = indices + record.k.shape[1] - record.q.shape[1]
    low = max(0, int((own + 1 - count_visible_keys(record, indices + query_range(record).start)).min()))
    index = to_device(record.q.device, indices)
    logits = record.masked_logits(index, slice(low, int(own[-1]) + 1))
    return low + record.first_key, logits


def row_masses(record: AttentionRecord, rows: IntArray, key_columns: Tensor) -> Iterator[tuple[IntArray, Tensor]]:
    """Weighted sums of columns [L, n] of the keys, of those of these rows that are queries of the record.

    Yields rows of the document [m] and sums [H, m, n], float32.
    """
    if record.key_sums is not None:
        index, offset = rows_in_chunk(rows, record), query_range(record).start
        yield index + offset, record.key_sums[:, to_device(record.q.device, index)]
        return
    columns = without_waiting(record.q.device, key_columns)
    for of_tile, first, weights in weight_tiles(record, rows):
        yield of_tile, weights @ columns[first : first + weights.shape[-1]]


class SpanMass:
    """Accumulates the mass between the spans of one text, of every head.

    With its `key_columns`, a listener costs a few percent of a pass for a few spans. The cost grows with their number;
    without key sums, as with more distinct spans than a head has dimensions, the weights are computed again.
    """

    def __init__(self, geometry: Geometry, layout: SpanLayout):
        self.geometry, self.layout = geometry, layout
        self.key_columns = torch.from_numpy(layout.keys.T.astype(np.float32))
        self._rows = np.flatnonzero(layout.queries.any(0))
        self._sums: dict[int, Tensor] = {}
        self._kinds: dict[int, tuple[int | None, int | None]] = {}

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer, or of the next chunk of its queries."""
        device = record.q.device
        self._kinds[record.layer] = record.window, record.chunk_size
        if record.layer not in self._sums:
            shape = len(record.q), len(self.layout.queries), self.layout.key_count
            self._sums[record.layer] = torch.zeros(shape, dtype=torch.float64, device=device)
        sums, spans = self._sums[record.layer], len(self.layout.keys)
        for rows, mass in row_masses(record, self._rows, self.key_columns):
            sums[..., :spans] += self._is_query(rows, device) @ mass.double()
        if self.layout.key_count > spans:
            for rows, first, weights in weight_tiles(record, self._rows):
                sums[..., spans:] += self._is_query(rows, device) @ self._relation_mass(rows, first, weights).double()

    def _is_query(self, rows: IntArray, device: torch.device) -> Tensor:
        return to_device(device, self.layout.queries[:, rows].astype(np.float64))

    def _relation_mass(self, rows: IntArray, first: int, weights: Tensor) -> Tensor:
        """Weight of each row on the keys of the kinds that depend on the query, [H, n, kinds]."""
        device, stop, mass = weights.device, first + weights.shape[-1], []
        if self.layout.tokens is not None:
            keys = np.arange(first, stop)
            is_same = self.layout.tokens[rows][:, None] == self.layout.tokens[first:stop]
            is_earlier = to_device(device, (is_same & (keys < rows[:, None])).astype(np.float32))
            mass.append((weights.transpose(0, 1) @ is_earlier[..., None]).transpose(0, 1))
        if self.layout.matching is not None:
            keys = self.layout.matching[rows] - first
            is_visible = (keys >= 0) & (self.layout.matching[rows] >= 0)
            index = to_device(device, np.where(is_visible, keys, 0)).expand(len(weights), -1)[..., None]
            mass.append(weights.gather(-1, index) * to_device(device, is_visible.astype(np.float32))[:, None])
        return torch.cat(mass, -1)

    def compute(self) -> Mapping[str, npt.NDArray[Any]]:
        """Columns layer, head, kv_group, query, key (numbers of the kinds), mass, chance, rows, hidden_rows.

        `mass` and `chance` are means over `rows`, 0..1; `hidden_rows` are the rows of the query span that see no such
        key. Pairs of spans without any row are left out.
        """
        layers = sorted(self._sums)
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for layer, sums in zip(layers, copy_together([self._sums[layer] for layer in layers]), strict=True):
            rows, chance, total = self._counts(*self._kinds[layer])
            query, key = np.nonzero(rows)
            head = np.repeat(np.arange(len(sums)), len(query))
            of_heads = [np.tile(values, len(sums)) for values in (query, key, chance[rows > 0], rows[rows > 0])]
            hidden = np.tile((total[:, None] - rows)[rows > 0], len(sums))
            mass = (sums.numpy()[:, query, key] / rows[query, key]).ravel().clip(0, 1)
            number = np.full(len(head), self.geometry.layer_numbers[layer])
            group = head // self.geometry.heads_per_group(layer)
            parts.append((number, head, group, of_heads[0], of_heads[1], mass, of_heads[2], of_heads[3], hidden))
        names = ("layer", "head", "kv_group", "query", "key", "mass", "chance", "rows", "hidden_rows")
        return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))

    def _counts(self, window: int | None, chunk_size: int | None) -> tuple[IntArray, FloatArray, IntArray]:
        """Rows that see a key of each kind, their mean chance [queries, kinds], and all rows [queries]."""
        counts, visible = self.layout.visible_span_keys(window, chunk_size)
        is_query = self.layout.queries.astype(np.int64)
        rows = is_query @ (counts > 0).T
        chance = is_query @ (counts / visible).T / np.maximum(rows, 1)
        return rows, chance, is_query.sum(1)


class LookbackRatios:
    """Lookback ratios of every head (Chuang et al. 2024, equations 1 to 3) for spans of a prompt.

    Of each row i from `prompt_length` on: c / (c + g) with the mean weight c per key of the span and g per key from
    `prompt_length` to i. Keys that a window hides count with weight 0, as in the published code. Then the mean over
    these rows, without rows whose weights are all 0.
    """

    def __init__(self, geometry: Geometry, keys: BoolArray, prompt_length: int):
        """`keys` [spans, L] are spans of the prompt, each with a token."""
        self.geometry, self.keys, self.prompt_length = geometry, keys, prompt_length
        is_new = np.arange(keys.shape[1]) >= prompt_length
        self.key_columns = torch.from_numpy(np.concatenate([keys, is_new[None]]).T.astype(np.float32))
        self._sums: dict[int, Tensor] = {}

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer, or of the next chunk of its queries."""
        device, length = record.q.device, self.keys.shape[1]
        sizes = to_device(device, self.keys.sum(1).astype(np.float64))
        for rows, row_mass in row_masses(record, np.arange(self.prompt_length, length), self.key_columns):
            mass = row_mass.double()
            new_keys = to_device(device, (rows + 1 - self.prompt_length).astype(np.float64))
            context, new = mass[..., :-1] / sizes, mass[..., -1:] / new_keys[:, None]
            total = context + new
            ratio = torch.where(total > 0, context / total, 0)
            sums = torch.stack((ratio.sum(1), (total > 0).double().sum(1)), -1)
            self._sums[record.layer] = self._sums.get(record.layer, 0) + sums

    def compute(self) -> Mapping[str, npt.NDArray[Any]]:
        """Columns layer, head, kv_group, key (number of the span), ratio (0..1) and rows."""
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        layers = sorted(self._sums)
        for layer, sums in zip(layers, copy_together([self._sums[layer] for layer in layers]), strict=True):
            ratio, rows = np.moveaxis(sums.numpy(), -1, 0)
            head, key = np.nonzero(rows)
            number = np.full(len(head), self.geometry.layer_numbers[layer])
            group = head // self.geometry.heads_per_group(layer)
            count = rows[head, key]
            parts.append((number, head, group, key, (ratio[head, key] / count).clip(0, 1), count.astype(np.int64)))
        names = ("layer", "head", "kv_group", "key", "ratio", "rows")
        return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))


class TokenWeights:
    """Mean weight of some rows on every token of a text, of every head: L values a head, for short texts."""

    def __init__(self, geometry: Geometry, rows: BoolArray):
        self.geometry, self.rows = geometry, rows
        self._sums: dict[int, Tensor] = {}

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer, or of the next chunk of its queries."""
        if record.layer not in self._sums:
            self._sums[record.layer] = torch.zeros(len(record.q), len(self.rows), device=record.q.device)
        for _, first, weights in weight_tiles(record, np.flatnonzero(self.rows)):
            self._sums[record.layer][:, first : first + weights.shape[-1]] += weights.sum(1)

    def compute(self) -> Mapping[str, npt.NDArray[Any]]:
        """Columns layer, head, kv_group, position and weight, 0..1."""
        layers = sorted(self._sums)
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for layer, sums in zip(layers, copy_together([self._sums[layer] for layer in layers]), strict=True):
            head, position = np.divmod(np.arange(sums.numel()), len(self.rows))
            number = np.full(len(head), self.geometry.layer_numbers[layer])
            weight = (sums.numpy().ravel() / self.rows.sum()).clip(0, 1)
            parts.append((number, head, head // self.geometry.heads_per_group(layer), position, weight))
        names = ("layer", "head", "kv_group", "position", "weight")
        return dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))
