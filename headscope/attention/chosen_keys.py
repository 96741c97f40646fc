"""The keys that an indexer of the model chose for each query: DeepSeek V3.2, GLM-5, MiniMax M3, Qwen4 and others."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """The keys of a call that each query may attend to, as far as the causal mask allows, in O(Lq n) memory.

    `numbers` [B, units, Lq, n], or [units, Lq, n] of one sequence, are indices of keys, or of blocks of `block_size`
    keys; -1 is none. A unit chooses for `heads_per_unit` query heads: one unit for the layer, or one per KV group.
    """

    numbers: Tensor
    heads_per_unit: int
    block_size: int = 1

    def of_sequence(self, sequence: int) -> "ChosenKeys":
        """The choice for one sequence of the batch."""
        return replace(self, numbers=self.numbers[sequence])

    def for_heads(self, heads: slice) -> "ChosenKeys":
        """The choice for some query heads: those of whole units, or some of one unit."""
        units = slice(heads.start // self.heads_per_unit, -(-heads.stop // self.heads_per_unit))
        size = min(self.heads_per_unit, heads.stop - heads.start)
        return replace(self, numbers=self.numbers[..., units, :, :], heads_per_unit=size)

    def by_unit(self, rows: Tensor, n_keys: int) -> Tensor:
        """Whether queries, by index [n], may attend to each of the first keys: bool [.., units, n, n_keys]."""
        blocks = -(-n_keys // self.block_size)
        numbers = self.numbers[..., rows, :].long()
        numbers = numbers.where((numbers >= 0) & (numbers < blocks), blocks)
        chosen = torch.zeros(*numbers.shape[:-1], blocks + 1, dtype=torch.bool, device=numbers.device)
        chosen.scatter_(-1, numbers, True)
        return chosen[..., :blocks].repeat_interleave(self.block_size, -1)[..., :n_keys]

    def by_head(self, rows: Tensor, n_keys: int) -> Tensor:
        """`by_unit` for every query head: bool [.., H, n, n_keys]."""
        return self.by_unit(rows, n_keys).repeat_interleave(self.heads_per_unit, -3)
