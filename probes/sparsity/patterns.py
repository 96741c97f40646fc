"""Rules by head: the patterns of a published file, each head's own best rule, and rules of a prompt alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.base.heads import Head
from headscope.errors import BadInput
from headscope.measures.row_sampling import query_range, to_device
from headscope.measures.row_tile import RowTile
from headscope.measures.sparse_rules import BlockMean, Rule, Streaming, VerticalSlash, parse_rule
from headscope.scores.minference import Patterns

PUBLISHED_BLOCKS = (64, 100)
"""Keys per block and number of blocks of MInference's `block_sparse`, whatever the file says."""


@dataclass(frozen=True)
class BlockSparse(BlockMean):
    """The blocks of all rows of a block are those of largest product of its mean query, as in MInference."""

    name: ClassVar[str] = "block-sparse"
    meaning: ClassVar[str] = "K blocks of B keys by mean query of the query's block . mean key, with the own block"
    needs_later_queries: ClassVar[bool] = True

    def scores(self, tile: RowTile) -> Tensor:
        first = query_range(tile.record).start
        blocks = torch.arange(first, first + tile.record.q.shape[1], device=tile.record.q.device) // self.block
        is_same = blocks == to_device(blocks.device, tile.rows // self.block)[:, None]
        sums = torch.einsum("nq,hqd->hnd", is_same.float(), tile.record.q.float())
        keys = self._of_blocks(tile, "mean")
        queries = (sums / is_same.sum(1)[:, None]).view(len(keys), -1, *sums.shape[1:])
        return (queries @ keys[:, None].mT).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class RuleByHead(Rule):
    """`rules`, and the number of the rule of every head, [H], by index of the layer."""

    rules: tuple[Rule, ...]
    numbers_by_layer: tuple[Tensor, ...]
    name: ClassVar[str] = "best"
    meaning: ClassVar[str] = "the keys of each head's own rule"
    needs_whole_text: ClassVar[bool] = True
    needs_dense_weights: ClassVar[bool] = False

    @classmethod
    def for_model(cls, by_head: Mapping[Head, Rule], geometry: Geometry) -> Self:
        """From the rules of all heads, by layer number and head."""
        rules = [*dict.fromkeys(by_head.values())]
        numbers = (
            torch.tensor([rules.index(by_head[number, head]) for head in range(count)])
            for number, count in zip(geometry.layer_numbers, geometry.layer_heads, strict=True)
        )
        return cls(tuple(rules), tuple(numbers))

    def __str__(self) -> str:
        return self.name

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


def own_rules(choice: pd.DataFrame, geometry: Geometry) -> RuleByHead:
    """Each head's own best rule, from the layer (its number), head and `own_rule` of all heads of a model."""
    names: dict[Any, str] = {(row.layer, row.head): str(row.own_rule) for row in choice.itertuples()}
    return RuleByHead.for_model({head: parse_rule(name) for head, name in names.items()}, geometry)


@dataclass(frozen=True, eq=False)
class HeadPatterns(RuleByHead):
    name: ClassVar[str] = "minference"
    meaning: ClassVar[str] = "the keys of each head's pattern in the file"


def head_patterns(patterns: Patterns, geometry: Geometry, label: str) -> HeadPatterns:
    """The patterns of a model's heads as rules. Raises BadInput if the file has other heads."""
    heads = [(number, head) for number, count in zip(geometry.layer_numbers, geometry.layer_heads, strict=True)
             for head in range(count)]  # fmt: skip
    if {*heads} != {*patterns}:
        raise BadInput(
            f"the pattern file has {len(patterns)} heads, up to {max(patterns)}, and '{label}' has {len(heads)}, "
            f"up to {max(heads)} (layer, head). Use the file of this model"
        )
    return HeadPatterns.for_model({head: _pattern_rule(*pattern) for head, pattern in patterns.items()}, geometry)


def _pattern_rule(pattern: str, vertical: int, slash: int) -> Rule:
    if pattern == "block_sparse":
        return BlockSparse(*PUBLISHED_BLOCKS)
    return Streaming(vertical, slash) if pattern == "stream_llm" else VerticalSlash(vertical, slash)


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
