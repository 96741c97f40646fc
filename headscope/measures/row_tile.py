"""Some query rows of one layer with their weights, and the sums and orders that the rules of sparse rows share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from headscope.attention.chosen_keys import ChosenKeys
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import IntArray, count_visible_keys, query_range, to_device


@dataclass(frozen=True, eq=False)
class RowTile:
    """Some rows of one layer: `rows` [n] of the document, ascending, and their weights [H, n, keys], 0 where hidden.

    Column 0 is key number `first` of the document. `layer_cache` is shared by all tiles of a record.
    `indexer_choice` are the keys that the model's own indexer chose, None if all; record and weights are those of dense
    attention.
    """

    record: AttentionRecord
    rows: IntArray
    first: int
    weights: Tensor
    layer_cache: dict[object, Tensor]
    tile_cache: dict[object, Tensor] = field(default_factory=dict)
    indexer_choice: ChosenKeys | None = None

    @property
    def distance(self) -> Tensor:
        """Tokens from each key to the row, [n, keys]."""
        return self.cached("distance", lambda: self._own[:, None] - self._keys)

    @property
    def is_visible(self) -> Tensor:
        """Whether each row sees each key, bool [n, keys]."""
        counts = to_device(self.weights.device, count_visible_keys(self.record, self.rows))[:, None]
        return self.cached("is_visible", lambda: (self.distance >= 0) & (self.distance < counts))

    def in_blocks(self, block: int) -> Tensor:
        """The weights by blocks of keys that are aligned to the document, [H, n, blocks, block]; 0 outside the tile."""

        def pad() -> Tensor:
            padding = self.first % block, -(self.first + self.weights.shape[-1]) % block
            padded = nn.functional.pad(self.weights, padding)
            return padded.view(*padded.shape[:2], -1, block)

        return self.cached(("in blocks", block), pad)

    def block_masses(self, block: int) -> Tensor:
        """The sums of `in_blocks`, [H, n, blocks]."""
        return self.cached(("block masses", block), lambda: self.in_blocks(block).sum(-1))

    @property
    def _own(self) -> Tensor:
        return to_device(self.weights.device, self.rows)

    @property
    def _keys(self) -> Tensor:
        return torch.arange(self.first, self.first + self.weights.shape[-1], device=self.weights.device)

    @property
    def columns(self) -> slice:
        """The keys of the tile, as indices of the record's keys."""
        start = self.first - self.record.first_key
        return slice(start, start + self.weights.shape[-1])

    def along_diagonals(self, by_distance: Tensor) -> Tensor:
        """Values by distance, [H, Lk], at the keys of every row, [H, n, keys]; 0 at keys after the row."""
        keys = self.weights.shape[-1]
        # Key by key the distances of a row fall by one: they are a window of the reversed values.
        windows = nn.functional.pad(by_distance.flip(-1), (0, keys)).unfold(-1, keys, 1)
        row_windows: Tensor = windows[:, to_device(windows.device, by_distance.shape[-1] - 1 - self.rows + self.first)]
        return row_windows

    @property
    def queries(self) -> Tensor:
        """The query vectors of the rows by KV group, [G, H / G, n, d], float32."""
        index = to_device(self.weights.device, self.rows - query_range(self.record).start)
        q: Tensor = self.record.q[:, index].float()
        return q.view(len(self.record.k), -1, *q.shape[1:])

    def sums(self, units: str) -> Tensor:
        """Weights of heads ("head"), or sums over KV groups ("group") or the layer ("layer"): [units, n, keys]."""
        if units == "head":
            return self.weights
        groups = self.record.group_count if units == "group" else 1
        shape = groups, -1, *self.weights.shape[1:]
        return self.cached(("sums", units), lambda: self.weights.view(shape).sum(1))

    def ordered(self, units: str) -> Tensor:
        """The `sums` of every row in ascending order."""
        return self.cached(("ordered", units), lambda: _ascending(self.sums(units)))

    def heaviest(self, units: str, count: int) -> Tensor:
        """Whether a key is among the `count` heaviest of the unit's row, 0 or 1 in float32, [units, n, keys].

        Of equal weights it is the later key; a key of weight 0 is in no set.
        """
        values, ordered = self.sums(units), self.ordered(units)
        smallest = ordered[..., max(0, ordered.shape[-1] - count), None].clamp(min=torch.finfo(values.dtype).tiny)
        if count < values.shape[-1] and _may_tie(ordered, count, smallest):
            is_larger, is_tied = values > smallest, values == smallest
            missing = count - is_larger.sum(-1, keepdim=True)
            from_end = is_tied.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
            return (is_larger | (is_tied & (from_end <= missing))).float()
        # On a CPU torch's comparison is vectorised only if its result has the type of the operands.
        return torch.ge(values, smallest, out=torch.empty_like(values))

    def cached(self, name: object, compute: Callable[[], Tensor]) -> Tensor:
        """A tensor that the rules of a tile share."""
        if name not in self.tile_cache:
            self.tile_cache[name] = compute()
        return self.tile_cache[name]

    def cached_in_layer(self, name: object, compute: Callable[[], Tensor]) -> Tensor:
        """A tensor that the rules of all tiles of a record share."""
        if name not in self.layer_cache:
            self.layer_cache[name] = compute()
        return self.layer_cache[name]


def _ascending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":  # several times as fast as torch's sort there, which also returns indices
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(-1).values


def _may_tie(ordered: Tensor, count: int, smallest: Tensor) -> bool:
    """Whether a key outside of a set may weigh as much as its smallest; a GPU is not waited for."""
    if ordered.device.type != "cpu":
        return True
    return bool((ordered[..., ordered.shape[-1] - count - 1, None] >= smallest).any())
