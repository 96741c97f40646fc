"""What each head loses if it attends to the keys of a rule only, streamed: mass, output, and overlap of the sets.

recall_i is the share of row i's weight that lies on the chosen keys, so that -ln recall_i is the KL divergence of the
renormalised sparse row from the dense one. A learned sink has no key: it is always kept, and recall is the share of the
weight of all keys. Rows are visited in cache-sized tiles; memory is O(L).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import (
    IntArray,
    items_per_tile,
    query_range,
    rows_in_chunk,
    to_device,
)
from headscope.measures.row_tile import RowTile
from headscope.measures.span_mass import row_weights
from headscope.measures.sparse_rules import Rule, as_float, with_all_keys
from headscope.measures.sparse_sums import STATISTICS, choices_of_rules

MASSES = {"keys_90": 0.90, "keys_95": 0.95, "keys_99": 0.99}
RECALL_QUANTILE = 0.05
OVERLAPS = ("overlap", "layer_overlap")
OVERLAP_ROWS = 4
"""Rows whose sets are compared with those of the query before and of the layer below."""
CHUNK_ALIGNMENT = 16
"""Rows at multiples of this are not compared with the query before, which may be in another chunk of the text."""
LOGITS_PER_TILE = 2**19
"""Logits in memory at once on a CPU."""


class SparseRows:
    """Accumulates statistics of rules and the keys needed for a mass, of every head, over query rows of one text.

    `select(window, chunk_size)` gives the rows of a layer with these, ascending; a row may repeat. Overlaps are
    those of a few rows of `select(None, None)` in every layer, so that layers of different windows can be compared.
    """

    def __init__(self, geometry: Geometry, rules: Sequence[Rule], select: Callable[[int | None, int | None], IntArray]):
        self.geometry, self.rules, self.select = geometry, [*rules], select
        self._compared = _rows_to_compare(select(None, None))
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._means: dict[int, tuple[Tensor, Tensor]] = {}
        self._overlaps: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._sets: dict[int, dict[int, Tensor]] = {}

    @property
    def needs_whole_text(self) -> bool:
        """Whether a rule must see all queries of a text at once."""
        return any(rule.needs_whole_text for rule in self.rules)

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer, or of the next chunk of its queries."""
        choice, record = record.chosen, with_all_keys(record)
        layer, start, elements = record.layer, query_range(record).start, len(record.q) * record.k.shape[1]
        self._sets = {number: sets for number, sets in self._sets.items() if number in (layer - 1, layer)}
        rows = self.select(record.window, record.chunk_size)
        visited = np.sort(np.concatenate([rows, np.setdiff1d(self._compared, rows)]))
        indices, layer_cache = rows_in_chunk(visited, record), dict[object, Tensor]()
        size = items_per_tile(record.q.device, max(2, LOGITS_PER_TILE // elements), elements)
        for begin in range(0, len(indices), size):
            own = indices[begin : begin + size]
            pairs = np.intersect1d(own[own > 0], self._compared - start)
            order = np.argsort(np.concatenate([own, pairs - 1]), kind="stable")
            tile_rows = np.concatenate([own, pairs - 1])[order]
            is_counted = (order < len(own)) & np.isin(tile_rows + start, rows)
            first, weights = row_weights(record, tile_rows)
            tile = RowTile(record, tile_rows + start, first, weights, layer_cache, indexer_choice=choice)
            self._add(tile, np.flatnonzero(is_counted), np.searchsorted(tile_rows, pairs))
        if len(rows) and sum(keys.shape[-1] for keys, _ in self._rows[layer]) == len(rows):
            keys, statistics = (torch.cat(parts, -1) for parts in zip(*self._rows.pop(layer), strict=True))
            worst = statistics[0].quantile(RECALL_QUANTILE, dim=-1)
            means = torch.cat([statistics.double().mean(-1), worst[None].double()])
            self._means[layer] = keys.double().mean(-1), means

    def _add(self, tile: RowTile, counted: IntArray, compared: IntArray) -> None:
        """Add a tile: the rows at the indices `counted`; those at `compared` follow their predecessor."""
        record, device = tile.record, tile.weights.device
        index = to_device(device, counted)
        compared_index = to_device(device, np.concatenate([compared - 1, compared]))
        queries = to_device(device, tile.rows - query_range(record).start)
        sink = 0.0 if record.sink_weight is None else record.sink_weight[:, queries]
        choices = [*choices_of_rules(tile, self.rules, compared_index)]
        order = to_device(device, np.argsort([number for choice in choices for number in choice.numbers]))
        statistics = torch.cat([choice.statistics(sink) for choice in choices], 1)[:, order]
        self._rows[record.layer].append((_keys_for_masses(tile)[..., index], statistics[..., index]))
        if len(compared):
            sets = torch.cat([choice.sets for choice in choices])[order]
            before, after = sets.chunk(2, 2)
            self._compare_sets(tile, before, after, tile.rows[compared])

    def _compare_sets(self, tile: RowTile, before: Tensor, after: Tensor, rows: IntArray) -> None:
        """Add the overlaps of sets [rules, H, rows, keys] with the query before and with the layer below."""
        layer = tile.record.layer
        shared, either = (as_float(both).sum(-1) for both in (before & after, before | after))
        self._overlaps["overlap", layer] += (shared / either.clamp(min=1)).unbind(-1)
        sets = self._sets.setdefault(layer, {})
        for row, of_row in zip(rows.tolist(), after.unbind(2), strict=True):
            sets[row] = nn.functional.pad(of_row, (tile.first, int(row) + 1 - tile.first - of_row.shape[-1]))
            if (below := self._sets.get(layer - 1, {}).get(row)) is not None:
                own, below = (as_float(of_layer.to(after.device)) for of_layer in (sets[row], below))
                shared = own @ below.mT
                either = own.sum(-1)[:, :, None] + below.sum(-1)[:, None] - shared
                self._overlaps["layer_overlap", layer].append(shared / either.clamp(min=1))

    def compute(self) -> tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, npt.NDArray[Any]]]:
        """Columns by head and rule, and those of the keys that each head needs; both have layer, head, kv_group.

        By rule (its number): `STATISTICS`, means over the rows, and recall_q05, their 5 % quantile; overlap with the
        set of the query before; layer_overlap, the largest with a head of the layer below (NaN in the first layer).
        """
        by_rule: list[dict[str, Any]] = []
        by_head: list[dict[str, Any]] = []
        for layer, (needed, means) in sorted(self._means.items()):
            heads = np.arange(needed.shape[1])
            place = {
                "layer": np.full(len(heads), self.geometry.layer_numbers[layer]),
                "head": heads,
                "kv_group": heads // self.geometry.heads_per_group(layer),
            }
            by_head.append({**place, **dict(zip(MASSES, needed.cpu().numpy(), strict=True))})
            columns = dict(zip((*STATISTICS, "recall_q05"), means.cpu().numpy(), strict=True))
            columns |= {name: self._mean_overlap(name, layer, columns["recall"]) for name in OVERLAPS}
            tiled = {name: np.tile(values, len(self.rules)) for name, values in place.items()}
            rule = np.repeat(np.arange(len(self.rules)), len(heads))
            by_rule.append({**tiled, "rule": rule, **{name: values.ravel() for name, values in columns.items()}})
        return _joined(by_rule), _joined(by_head)

    def _mean_overlap(self, name: str, layer: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Mean overlap over rows, [rules, H]; that with the layer below is the largest over its heads."""
        if not (of_rows := self._overlaps.get((name, layer))):
            return np.full_like(like, np.nan)
        mean = torch.stack(of_rows).double().mean(0)
        return (mean.amax(-1) if name == "layer_overlap" else mean).cpu().numpy()


def _rows_to_compare(rows: IntArray) -> IntArray:
    """A few of the rows, spread evenly, whose predecessor is in the same chunk of the text."""
    candidates = np.unique(rows[rows % CHUNK_ALIGNMENT != 0])
    spread = np.linspace(0, len(candidates) - 1, min(OVERLAP_ROWS, len(candidates)))
    return candidates[spread.astype(np.int64)]


def _keys_for_masses(tile: RowTile) -> Tensor:
    """The fewest keys whose mass reaches each of `MASSES`, [masses, H, n], float32."""
    sums = tile.ordered("head").cumsum(-1, dtype=torch.float64)
    shares = to_device(sums.device, np.array([*MASSES.values()]))
    # The lightest keys that may be missing. The first of those that are not is needed.
    limits = sums[..., -1:] * (1 - shares) * (1 + 1e-12)
    return (sums.shape[-1] - torch.searchsorted(sums, limits, right=True)).movedim(-1, 0).float()


def _joined(parts: list[dict[str, Any]]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
