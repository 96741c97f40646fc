"""Sparse selections: rules that choose which keys a query row attends to, and how few keys hold most of its weight.

A rule is a frozen dataclass whose fields are its sizes, written NAME:SIZE:SIZE. Another package adds one in a file with
a subclass of `Rule` and an entry point of the group `headscope.sparse_rules` that names it.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from headscope.attention.edited_attention import outputs_of_record
from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import count_visible_keys, query_range, to_device
from headscope.measures.row_tile import RowTile
from headscope.measures.span_mass import row_weights

GROUP = "headscope.sparse_rules"
"""Group of the entry points; the name of an entry point is the name of its rule."""
LAST_QUERIES = 64
"""Queries whose mean weights choose the columns and diagonals of `vertical-slash`, as in MInference."""
MAX_SIZE = 2**24
RESERVED_NAMES = frozenset({"best", "dense", "indexer", "minference"})
"""Names in the column `rule` that are no rules of the options."""

log = logging.getLogger("headscope")


class Rule(ABC):
    """Chooses keys; a subclass is a frozen dataclass whose fields are sizes, at least 1. Only `select` is needed."""

    name: ClassVar[str]
    meaning: ClassVar[str]
    needs_whole_text: ClassVar[bool] = False
    """Whether its choice for a row may depend on later queries or on keys that the row does not see."""
    needs_later_queries: ClassVar[bool] = True
    """If it needs the whole text: whether because of later queries, so that it cannot choose keys in decoding."""
    needs_dense_weights: ClassVar[bool] = True
    """Whether it needs the weights of all keys: it bounds other rules, but saves nothing."""
    is_layer_wide: ClassVar[bool] = True
    """Whether the choice of a head may depend on other heads of its layer."""
    needs_log_sums: ClassVar[bool] = True
    """Whether `select` reads the log-sum-exp of the tile's record, which costs a further pass over the keys."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "select" in vars(cls):  # what another rule says of its own choice does not hold for this one
            for name in {"keep_mask", "possible_columns", "is_layer_wide", "needs_log_sums"} - {*vars(cls)}:
                setattr(cls, name, getattr(Rule, name))

    @property
    def depends_on_later_queries(self) -> bool:
        return self.needs_whole_text and self.needs_later_queries

    @abstractmethod
    def select(self, tile: RowTile) -> Tensor:
        """The chosen keys, bool [H or 1, n, keys]. Keys that a row does not see may be among them."""

    def keep_mask(self, tile: RowTile) -> Tensor:
        """1 for the chosen keys that a row sees, 0 for others, float32 [H, G or 1, n, keys]."""
        return as_float(self.select(tile) & tile.is_visible)

    def possible_columns(self, tile: RowTile) -> list[slice]:
        """Ranges of the tile's columns that contain every key that the rule may choose.

        There is at least one; none is empty; they ascend and do not overlap.
        """
        return [slice(0, tile.weights.shape[-1])]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, size.name) for size in fields(self))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return ":".join((self.name, *map(str, self.sizes)))


@dataclass(frozen=True)
class Top(Rule):
    keys: int
    name: ClassVar[str] = "top"
    meaning: ClassVar[str] = "the K heaviest keys of the head's row"
    units: ClassVar[str] = "head"
    is_layer_wide: ClassVar[bool] = False
    needs_log_sums: ClassVar[bool] = False

    def select(self, tile: RowTile) -> Tensor:
        chosen = tile.heaviest(self.units, self.keys).bool()
        return chosen.repeat_interleave(len(tile.weights) // len(chosen), 0)

    def keep_mask(self, tile: RowTile) -> Tensor:  # a key that a row does not see has the weight 0 and is never chosen
        return tile.heaviest(self.units, self.keys)


@dataclass(frozen=True)
class GroupTop(Top):
    name: ClassVar[str] = "group-top"
    meaning: ClassVar[str] = "the K heaviest keys by the summed weights of the KV group's heads"
    units: ClassVar[str] = "group"
    is_layer_wide: ClassVar[bool] = True


@dataclass(frozen=True)
class LayerTop(Top):
    name: ClassVar[str] = "layer-top"
    meaning: ClassVar[str] = "the K heaviest keys by the summed weights of the layer's heads"
    units: ClassVar[str] = "layer"
    is_layer_wide: ClassVar[bool] = True


@dataclass(frozen=True)
class Blocks(Rule):
    """Blocks are aligned to the document. The query's own block is always chosen, unless a block is a single key.

    Blocks compete only if the row sees a key of theirs.
    """

    block: int
    blocks: int
    name: ClassVar[str] = "block"
    meaning: ClassVar[str] = "K blocks of B keys by their mass, the query's own block among them"
    is_layer_wide: ClassVar[bool] = False
    needs_log_sums: ClassVar[bool] = False

    def scores(self, tile: RowTile) -> Tensor:
        """Scores of the blocks from that of column 0 on, [H, n, blocks]."""
        return tile.block_masses(self.block)

    @final
    def select(self, tile: RowTile) -> Tensor:
        return self.keys_of(tile, self.chosen_blocks(tile))

    def chosen_blocks(self, tile: RowTile) -> Tensor:
        """The chosen blocks, bool [H, n, blocks], from that of column 0 on."""
        scores = tile.cached((self.name, self.block), lambda: self._competing_scores(tile))
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        return chosen.scatter_(-1, scores.topk(min(self.blocks, scores.shape[-1])).indices, True)

    def _competing_scores(self, tile: RowTile) -> Tensor:
        """The scores: -inf for blocks without a visible key, inf for the query's own."""
        scores, first_block = self.scores(tile).clone(), tile.first // self.block
        own = to_device(scores.device, tile.rows // self.block)[:, None]
        numbers = torch.arange(first_block, first_block + scores.shape[-1], device=scores.device)
        scores.masked_fill_(numbers > own, -torch.inf)
        low = to_device(scores.device, tile.rows + 1 - count_visible_keys(tile.record, tile.rows))[:, None]
        scores.masked_fill_((numbers + 1) * self.block <= low, -torch.inf)
        if self.block > 1:
            scores.masked_fill_(numbers == own, torch.inf)
        return scores

    def keys_of(self, tile: RowTile, blocks: Tensor) -> Tensor:
        """The keys of the tile that belong to blocks [.., blocks], bool [.., keys]."""
        offset = tile.first % self.block
        return blocks.repeat_interleave(self.block, -1)[..., offset : offset + tile.weights.shape[-1]]

    @staticmethod
    def _end(tile: RowTile) -> int:
        return tile.first + tile.weights.shape[-1]

    def _of_blocks(self, tile: RowTile, how: str) -> Tensor:
        """Mean, minimum or maximum of the keys of each block of the tile, [G, blocks, d], over the record's keys."""

        def pool() -> Tensor:
            keys, first = tile.record.k.float(), tile.record.first_key
            padding = (0, 0, first % self.block, -(first + keys.shape[1]) % self.block)
            is_key = nn.functional.pad(torch.ones_like(keys[0, :, :1]), padding).view(-1, self.block, 1)
            fill = {"mean": 0.0, "min": torch.inf, "max": -torch.inf}[how]
            blocks = nn.functional.pad(keys, padding, value=fill).view(len(keys), -1, self.block, keys.shape[-1])
            if how == "mean":
                return blocks.sum(2) / is_key.sum(1)
            return blocks.amin(2) if how == "min" else blocks.amax(2)

        pooled = tile.cached_in_layer((how, self.block), pool)
        start = tile.first // self.block - tile.record.first_key // self.block
        stop = (self._end(tile) - 1) // self.block - tile.record.first_key // self.block + 1
        return pooled[:, start:stop]


@dataclass(frozen=True)
class BlockMean(Blocks):
    name: ClassVar[str] = "block-mean"
    meaning: ClassVar[str] = "K blocks of B keys by q . mean of the block's keys (as MoBA), with the own block"
    needs_whole_text: ClassVar[bool] = True
    needs_later_queries: ClassVar[bool] = False
    needs_dense_weights: ClassVar[bool] = False

    def scores(self, tile: RowTile) -> Tensor:
        return _scores(tile.queries, self._of_blocks(tile, "mean"))


@dataclass(frozen=True)
class BlockBounds(Blocks):
    name: ClassVar[str] = "block-bounds"
    meaning: ClassVar[str] = "K blocks of B keys by an upper bound of q . k (as Quest), with the own block"
    needs_whole_text: ClassVar[bool] = True
    needs_later_queries: ClassVar[bool] = False
    needs_dense_weights: ClassVar[bool] = False

    def scores(self, tile: RowTile) -> Tensor:
        q, low, high = tile.queries, self._of_blocks(tile, "min"), self._of_blocks(tile, "max")
        return _scores(q.clamp(min=0), high) + _scores(q.clamp(max=0), low)


def _scores(queries: Tensor, of_blocks: Tensor) -> Tensor:
    """Products [H, n, blocks] of queries [G, H / G, n, d] with vectors [G, blocks, d]."""
    return (queries @ of_blocks[:, None].mT).flatten(0, 1)


@dataclass(frozen=True)
class Streaming(Rule):
    sink: int
    recent: int
    name: ClassVar[str] = "streaming"
    meaning: ClassVar[str] = "the first SINK and last RECENT keys"
    needs_dense_weights: ClassVar[bool] = False
    is_layer_wide: ClassVar[bool] = False
    needs_log_sums: ClassVar[bool] = False

    def select(self, tile: RowTile) -> Tensor:
        is_sink = tile.distance > to_device(tile.weights.device, tile.rows - self.sink)[:, None]
        return (is_sink | (tile.distance < self.recent))[None]

    def possible_columns(self, tile: RowTile) -> list[slice]:
        keys = tile.weights.shape[-1]
        sink, recent = (int(np.clip(key - tile.first, 0, keys)) for key in (self.sink, tile.rows[0] + 1 - self.recent))
        if recent <= sink or tile.record.chunk_size is not None:  # a row of a chunk may see no key between the two
            return [slice(0, keys)]
        return [slice(0, sink), slice(recent, keys)] if sink else [slice(recent, keys)]


@dataclass(frozen=True)
class VerticalSlash(Rule):
    vertical: int
    slash: int
    name: ClassVar[str] = "vertical-slash"
    meaning: ClassVar[str] = "V columns and S diagonals of largest weight in the last 64 queries (as MInference)"
    needs_whole_text: ClassVar[bool] = True
    needs_dense_weights: ClassVar[bool] = False
    is_layer_wide: ClassVar[bool] = False

    def select(self, tile: RowTile) -> Tensor:
        by_column, by_distance = tile.cached_in_layer((self.name, self.sizes), lambda: self._chosen(tile))
        chosen: Tensor = by_column[:, None, tile.columns] | tile.along_diagonals(by_distance)
        return chosen

    def _chosen(self, tile: RowTile) -> Tensor:
        """Whether columns and diagonals are chosen, bool [2, H, Lk]."""
        by_column, by_distance = vertical_slash_sums(tile)
        return torch.stack([_largest(by_column, self.vertical), _largest(by_distance, self.slash)])


@dataclass(frozen=True)
class Indexer(Rule):
    """The choice of the model's own indexer. It has no size; it is measured in every model that has one, unasked."""

    name: ClassVar[str] = "indexer"
    meaning: ClassVar[str] = "the keys that the model's own indexer chose"
    needs_dense_weights: ClassVar[bool] = False

    def select(self, tile: RowTile) -> Tensor:
        if tile.indexer_choice is None:
            return torch.ones_like(tile.weights[:1], dtype=torch.bool)
        rows = to_device(tile.weights.device, tile.rows - query_range(tile.record).start)
        return tile.indexer_choice.by_head(rows, tile.record.k.shape[1])[..., tile.columns]


def as_float(is_kept: Tensor) -> Tensor:
    """1 for True, in float32: torch converts bool several times as slowly on a CPU."""
    return is_kept.view(torch.uint8).float()


def with_all_keys(record: AttentionRecord) -> AttentionRecord:
    """The record of dense attention with the same q, k and v, if an indexer chose the record's keys."""
    if record.chosen is None:
        return record
    dense = replace(record, row_sums=None, key_sums=None, chosen=None)
    z, lse = outputs_of_record(dense)
    return replace(dense, z=z.to(record.z.dtype), lse=lse)


def vertical_slash_sums(tile: RowTile) -> Tensor:
    """Weights of the last queries of the record summed by key and by distance, [2, H, Lk]."""

    def sums() -> Tensor:
        record, queries = tile.record, tile.record.q.shape[1]
        first, weights = row_weights(record, np.arange(max(0, queries - LAST_QUERIES), queries))
        unseen = first - record.first_key
        by_column = nn.functional.pad(weights.sum(1), (unseen, 0))
        return torch.stack([by_column, nn.functional.pad(_diagonal_sums(weights), (0, unseen))])

    return tile.cached_in_layer("vertical and slash", sums)


def _largest(values: Tensor, count: int) -> Tensor:
    chosen = torch.zeros_like(values, dtype=torch.bool)
    return chosen.scatter_(-1, values.topk(min(count, values.shape[-1])).indices, True)


def _diagonal_sums(weights: Tensor) -> Tensor:
    """Sums of the weights [H, n, keys] of the last n rows by distance, [H, keys]."""
    heads, rows, keys = weights.shape
    # After rows - 1 zeros in front, the window of row r that starts at column r ends at the row's own key.
    padded = nn.functional.pad(weights, (rows - 1, 0))
    step = padded.shape[-1]
    return padded.as_strided((heads, rows, keys), (rows * step, step + 1, 1)).sum(1).flip(-1)


BUILT_IN: tuple[type[Rule], ...] = (Top, GroupTop, LayerTop, Blocks, BlockMean, BlockBounds, Streaming, VerticalSlash)


@cache
def known_rules() -> Mapping[str, type[Rule]]:
    """The rules by name: headscope's own and those of other packages. A broken one is reported and left out."""
    rules = {rule.name: rule for rule in BUILT_IN}
    for entry in entry_points(group=GROUP):
        try:
            rule = entry.load()
            if not (isinstance(rule, type) and issubclass(rule, Rule) and is_dataclass(rule)):
                raise TypeError(f"{entry.value} is no dataclass of Rule")
            if rule.name != entry.name or rule.name in {*rules, *RESERVED_NAMES}:
                raise ValueError(f"its name is '{rule.name}', which must be that of its entry point and a new one")
            rules[rule.name] = rule
        except Exception as error:  # third-party code can fail in any way
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            log.warning("rule '%s' is left out: %s. Fix or uninstall its package", entry.name, reason[:300])
    return rules


def parse_rule(text: str) -> Rule:
    """The rule that a text such as top:256 or block:64:16 names. Raises ValueError for any other text."""
    name, *sizes = text.split(":")
    rules = known_rules()
    if text == Indexer.name:
        raise ValueError("rule 'indexer' is measured in every model that has an indexer. Leave it out")
    if name not in rules:
        raise ValueError(f"unknown rule '{text[:60]}'. Use one of: {', '.join(rules)}")
    names = [size.name for size in fields(rules[name])]  # type: ignore[arg-type]
    is_size = [size.isascii() and size.isdigit() and 1 <= int(size) <= MAX_SIZE for size in sizes]
    if len(sizes) != len(names) or not all(is_size):
        form = ":".join((name, *(name.upper() for name in names)))
        raise ValueError(f"'{text[:60]}' is not {form} with whole numbers from 1 to {MAX_SIZE:,}. Write it so")
    return rules[name](*map(int, sizes))
