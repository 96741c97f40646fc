"""The rule of a published pattern file: every head has its own number of columns and diagonals."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headscope.attention.record import Geometry
from headscope.errors import BadInput
from headscope.measures.row_sampling import without_waiting
from headscope.measures.sparse_rules import RowTile, Rule, vertical_slash_sums
from headscope.scores.minference import Patterns


@dataclass(frozen=True, eq=False)
class HeadPatterns(Rule):
    """`sizes_by_layer`: columns and diagonals of every head, [2, H, 1], by index of the layer."""

    sizes_by_layer: tuple[Tensor, ...]
    name: ClassVar[str] = "minference"
    meaning: ClassVar[str] = "columns and diagonals of largest weight in the last 64 queries, as many as the file says"
    needs_whole_text: ClassVar[bool] = True
    needs_dense_weights: ClassVar[bool] = False

    @classmethod
    def for_model(cls, patterns: Patterns, geometry: Geometry, label: str) -> "HeadPatterns":
        """The patterns of a model's heads. Raises BadInput if the file has other heads."""
        heads = [(number, head) for number, count in zip(geometry.layer_numbers, geometry.layer_heads, strict=True)
                 for head in range(count)]  # fmt: skip
        if {*heads} != {*patterns}:
            raise BadInput(
                f"the pattern file has {len(patterns)} heads, up to {max(patterns)}, and '{label}' has {len(heads)}, "
                f"up to {max(heads)} (layer, head). Use the file of this model"
            )
        sizes = (
            torch.tensor([patterns[number, head] for head in range(count)]).T[..., None]
            for number, count in zip(geometry.layer_numbers, geometry.layer_heads, strict=True)
        )
        return cls(tuple(sizes))

    def select(self, tile: RowTile) -> Tensor:
        columns, diagonals = vertical_slash_sums(tile)
        vertical, slash = without_waiting(columns.device, self.sizes_by_layer[tile.record.layer])
        chosen = _ranks(columns) < vertical
        by_distance = _ranks(diagonals) < slash
        selected: Tensor = chosen[:, None, tile.columns] | by_distance[:, tile.distance.clamp(min=0)]
        return selected


def _ranks(values: Tensor) -> Tensor:
    """Rank of every value in its row, 0 for the largest."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
