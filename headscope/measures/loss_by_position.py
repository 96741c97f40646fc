"""Next-token loss by position, from chunks of logits, so that memory stays O(chunk x vocabulary)."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from headscope.bins import position_bin_edges


class LossByPosition:
    """Accumulates the loss of the predicted tokens 1..length-1 into log-spaced bins of position, in float64."""

    name = "nll"

    def __init__(self, length: int):
        self.edges = torch.from_numpy(position_bin_edges(length))
        self.sums = torch.zeros(len(self.edges), dtype=torch.float64)
        self.counts = torch.zeros(len(self.edges), dtype=torch.int64)

    def update(self, logits: Tensor, targets: Tensor, first_position: int) -> None:
        """Take logits [n, vocabulary] and the tokens [n] that they predict, at positions first, first + 1, ..."""
        losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none").double().cpu()
        bins = torch.bucketize(torch.arange(first_position, first_position + len(targets)), self.edges)
        self.sums.index_add_(0, bins, losses)
        self.counts += torch.bincount(bins, minlength=len(self.edges))

    def merge(self, other: "LossByPosition") -> None:
        """Add what another accumulator of the same length has seen."""
        self.sums += other.sums
        self.counts += other.counts

    def compute(self) -> Mapping[str, np.ndarray]:
        """Columns of the `nll` table without model, length and doc: mean nats per token of each bin that has tokens."""
        kept = self.counts > 0
        columns = {
            "position": self.edges[kept],
            "nll": self.sums[kept] / self.counts[kept],
            "tokens": self.counts[kept],
        }
        return {name: column.numpy() for name, column in columns.items()}
