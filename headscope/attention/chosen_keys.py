"""The keys that an indexer of the model chose for each query: DeepSeek V3.2, GLM-5, MiniMax M3, Qwen4 and others."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """The keys of a call that each query may attend to, as far as the causal mask allows, in O(Lq n) memory.

    `indices` [B, units, Lq, n], or [units, Lq, n] of one sequence, are indices of keys, or of blocks of `block_size`
    keys; -1 is none. A unit chooses for `heads_per_unit` query heads: of the layer, or of a KV group.
    """

    indices: Tensor
    heads_per_unit: int
    block_size: int = 1

    def of_sequence(self, sequence: int) -> "ChosenKeys":
        """The choice for one sequence of the batch."""
        return replace(self, indices=self.indices[sequence])

    def for_sequences(self, sequences: slice | Tensor) -> "ChosenKeys":
        """The choice for some sequences of the batch: a slice, or their indices [n], which may repeat."""
        return replace(self, indices=self.indices[sequences])

    def as_batch(self) -> "ChosenKeys":
        """The choice for one sequence as that of a batch of one."""
        return replace(self, indices=self.indices[None])

    def for_heads(self, heads: slice) -> "ChosenKeys":
        """The choice for some query heads: those of whole units, or some of one unit."""
        units = slice(heads.start // self.heads_per_unit, -(-heads.stop // self.heads_per_unit))
        size = min(self.heads_per_unit, heads.stop - heads.start)
        return replace(self, indices=self.indices[..., units, :, :], heads_per_unit=size)

    def by_unit(self, rows: Tensor, n_keys: int) -> Tensor:
        """Whether queries, by index [n], may attend to each of the first keys: bool [.., units, n, n_keys]."""
        blocks = -(-n_keys // self.block_size)
        indices = self.indices[..., rows, :].long()
        indices = indices.where((indices >= 0) & (indices < blocks), blocks)
        chosen = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
        chosen.scatter_(-1, indices, True)
        return chosen[..., :blocks].repeat_interleave(self.block_size, -1)[..., :n_keys]

    def by_head(self, rows: Tensor, n_keys: int) -> Tensor:
        """`by_unit` for every query head: bool [.., H, n, n_keys]."""
        return self.by_unit(rows, n_keys).repeat_interleave(self.heads_per_unit, -3)
