"""Sums of weights and values over the keys that rules choose in a tile of rows: key by key, or by whole blocks.

Rules that choose blocks of one size share the sums of every block: a rule then costs a product with as many terms as a
row has blocks, not keys.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from headscope.measures.row_tile import RowTile
from headscope.measures.sparse_rules import Blocks, Rule, as_float

STATISTICS = ("recall", "kl", "top1", "error", "kept")
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over keys by weight: of the weights [.., H, n], and of the values [.., H, n, dv]."""

    mass: Tensor
    output: Tensor


@dataclass(frozen=True, eq=False)
class Choices:
    """What several rules choose in a tile of rows.

    `numbers` are those of the rules. `dense` are the sums over all keys [H, n], `sparse` those over the chosen ones
    [rules, H, n]. `is_hit` says whether the heaviest key is among them, of equally heavy keys any one; `size` counts
    them. `sets` are the chosen keys of some of the rows, bool [rules, H, rows, keys].
    """

    numbers: list[int]
    dense: Sums
    sparse: Sums
    is_hit: Tensor
    size: Tensor
    sets: Tensor

    def statistics(self, sink: Tensor | float) -> Tensor:
        """`STATISTICS` of rows, [5, rules, H, n]; `sink` [H, n] is the weight of a learned sink, which has no key."""
        dense, sparse = self.dense, self.sparse
        recall = (sparse.mass / dense.mass).clamp(max=1)
        scale = (sparse.mass + sink) / (dense.mass + sink)
        output = sparse.output / scale.clamp(min=TINY)[..., None]
        error = (output - dense.output).norm(dim=-1) / dense.output.norm(dim=-1).clamp(min=TINY)
        return torch.stack([recall, -recall.clamp(min=TINY).log(), self.is_hit.float(), error, self.size])


def choices_of_rules(tile: RowTile, rules: Sequence[Rule], set_rows: Tensor) -> Iterator[Choices]:
    """The choices of all rules, in groups; `set_rows` are the indices of the rows whose sets are kept."""
    values = tile.record.v[:, tile.columns].float()
    by_key: dict[int, Rule] = {}
    by_block: dict[int, dict[int, Blocks]] = defaultdict(dict)
    for number, rule in enumerate(rules):
        # Sums of smaller blocks would take much more memory than the weights.
        if isinstance(rule, Blocks) and 2 * rule.block >= values.shape[-1]:
            by_block[rule.block][number] = rule
        else:
            by_key[number] = rule
    if by_key:
        yield _choices_by_key(tile, values, by_key, set_rows)
    for block, of_block in by_block.items():
        yield _choices_by_block(tile, values, block, of_block, set_rows)


def _choices_by_key(tile: RowTile, values: Tensor, rules: Mapping[int, Rule], set_rows: Tensor) -> Choices:
    masked = torch.empty_like(tile.weights)
    mass, output, heaviest, sizes, sets = [], [], [], [], []
    for rule in rules.values():
        keep_mask = rule.keep_mask(tile)
        shape = len(keep_mask), len(masked) // len(keep_mask), *masked.shape[1:]
        sets.append(keep_mask.index_select(1, set_rows).bool().repeat_interleave(shape[1], 0))
        sizes.append(keep_mask.sum(-1).repeat_interleave(shape[1], 0))
        sums, maxima = [], []
        for columns in rule.possible_columns(tile):
            weights, of_columns = tile.weights.view(shape)[..., columns], masked[..., columns]
            torch.mul(weights, keep_mask[:, None, :, columns], out=masked.view(shape)[..., columns])
            sums.append(_sums(of_columns, values[:, columns]))
            maxima.append(of_columns.amax(-1))
        mass.append(reduce(torch.add, [part.mass for part in sums]))
        output.append(reduce(torch.add, [part.output for part in sums]))
        heaviest.append(reduce(torch.maximum, maxima))
    is_hit = torch.stack(heaviest) >= tile.weights.amax(-1)
    sparse = Sums(torch.stack(mass), torch.stack(output))
    return Choices([*rules], _sums(tile.weights, values), sparse, is_hit, torch.stack(sizes), torch.stack(sets))


def _sums(weights: Tensor, values: Tensor) -> Sums:
    """Sums of weights [H, n, keys] and values [G, keys, dv]."""
    output = weights.view(len(values), -1, weights.shape[-1]) @ values
    return Sums(weights.sum(-1), output.view(*weights.shape[:2], -1))


def _choices_by_block(
    tile: RowTile, values: Tensor, block: int, rules: Mapping[int, Blocks], set_rows: Tensor
) -> Choices:
    (heads, rows, keys), groups = tile.weights.shape, len(values)
    before = tile.first % block
    padding = before, -(before + keys) % block
    weights = tile.in_blocks(block)
    is_visible = nn.functional.pad(tile.is_visible, padding).view(rows, -1, block)
    values = nn.functional.pad(values, (0, 0, *padding)).view(groups, -1, block, values.shape[-1])
    output = (weights.view(groups, -1, *weights.shape[2:]).transpose(1, 2) @ values).transpose(1, 2)
    of_block = torch.cat(
        [output.reshape(heads * rows, *output.shape[2:]), tile.block_masses(block).view(heads * rows, -1, 1)], -1
    )
    chosen = torch.stack([rule.chosen_blocks(tile) for rule in rules.values()])
    kept = as_float(chosen)
    # All blocks are summed like the chosen ones, so that a rule that keeps everything has a recall of exactly 1.
    is_summed = torch.cat([torch.ones_like(kept[:1]), kept]).view(len(rules) + 1, heads * rows, -1).movedim(0, 1)
    sums = (is_summed @ of_block).movedim(1, 0).view(len(rules) + 1, heads, rows, -1)
    heaviest = weights.amax(-1)
    is_hit = (kept * heaviest).amax(-1) >= heaviest.amax(-1)
    sets = torch.stack(
        [rule.keys_of(tile, of_rule[:, set_rows]) for rule, of_rule in zip(rules.values(), chosen, strict=True)]
    )
    return Choices(
        [*rules],
        Sums(sums[0, ..., -1], sums[0, ..., :-1]),
        Sums(sums[1:, ..., -1], sums[1:, ..., :-1]),
        is_hit,
        (kept * is_visible.sum(-1)).sum(-1),
        sets & tile.is_visible[set_rows],
    )
