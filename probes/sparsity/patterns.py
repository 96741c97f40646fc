"""Rules by head: the sizes of a published pattern file, each head's own best rule, and rules of a prompt alone."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.measures.row_tile import RowTile
from headscope.measures.sparse_rules import Rule, parse_rule, vertical_slash_sums
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
        selected: Tensor = chosen[:, None, tile.columns] | tile.along_diagonals(by_distance)
        return selected


@dataclass(frozen=True, eq=False)
class OwnRules(Rule):
    """`rules`, and the number of the rule of every head, [H], by index of the layer."""

    rules: tuple[Rule, ...]
    numbers_by_layer: tuple[Tensor, ...]
    name: ClassVar[str] = "best"
    meaning: ClassVar[str] = "the keys of each head's own rule"
    needs_whole_text: ClassVar[bool] = True
    needs_dense_weights: ClassVar[bool] = False

    @classmethod
    def for_model(cls, choice: pd.DataFrame, geometry: Geometry) -> "OwnRules":
        """From the layer (its number), head and `own_rule` of all heads of a model."""
        rules = {(row.layer, row.head): str(row.own_rule) for row in choice.itertuples()}
        names = [*dict.fromkeys(rules.values())]
        numbers = (
            torch.tensor([names.index(rules[number, head]) for head in range(count)])
            for number, count in zip(geometry.layer_numbers, geometry.layer_heads, strict=True)
        )
        return cls(tuple(map(parse_rule, names)), tuple(numbers))

    @property
    def depends_on_later_queries(self) -> bool:
        return any(rule.depends_on_later_queries for rule in self.rules)

    def select(self, tile: RowTile) -> Tensor:
        numbers = self.numbers_by_layer[tile.record.layer]
        own = without_waiting(tile.weights.device, numbers)[:, None, None]
        chosen = torch.zeros_like(tile.weights, dtype=torch.bool)
        for number in {*numbers.tolist()}:
            chosen |= (own == number) & self.rules[number].select(tile)
        return chosen


@dataclass(frozen=True, eq=False)
class PromptRule(Rule):
    """A rule that chooses keys of a text's first `tokens` from these alone; later rows keep all keys.

    So does MInference, where only the prompt is sparse and decoding is dense. The pass has no other rule.
    """

    rule: Rule
    tokens: int
    name: ClassVar[str] = "prompt"
    meaning: ClassVar[str] = "the keys of a rule in the rows of the prompt"
    needs_whole_text: ClassVar[bool] = True

    def select(self, tile: RowTile) -> Tensor:
        chosen = torch.ones_like(tile.weights, dtype=torch.bool)
        rows = tile.rows[tile.rows < self.tokens]
        if len(rows):
            of_prompt = slice(len(rows)), slice(self.tokens - tile.first)
            weights, record = tile.weights[:, *of_prompt], self._of_prompt(tile.record)
            chosen[:, *of_prompt] = self.rule.select(RowTile(record, rows, tile.first, weights, tile.layer_cache))
        return chosen

    def _of_prompt(self, record: AttentionRecord) -> AttentionRecord:
        """The record of the same pass over the prompt alone."""
        names = ("q", "k", "v", "z", "lse")
        return replace(
            record, row_sums=None, key_sums=None, **{name: getattr(record, name)[:, : self.tokens] for name in names}
        )


def _ranks(values: Tensor) -> Tensor:
    """Rank of every value in its row, 0 for the largest."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
