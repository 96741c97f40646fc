"""Which query rows a measure looks at: all of them, or N chosen with a seed. The choice never depends on the model."""

import math

import torch
from torch import Tensor

FIRST = 16
"""Log-spaced rows start where a row sees this many keys: below, every octave holds only a handful of rows."""


def log_spaced(length: int, count: int, seed: int) -> Tensor:
    """About `count` distinct rows of 0..length-1, one from each of `count` equal steps of ln(visible keys).

    For questions about growth with length. Sorted, int64.
    """
    low = min(FIRST, length)
    share = (torch.arange(count) + _jitter(count, seed)) / count
    visible = torch.exp(share * math.log(length / low)) * low
    rows: Tensor = torch.unique(visible.round().long().clamp(1, length) - 1)
    return rows


def pair_spaced(visible: Tensor, count: int, seed: int) -> Tensor:
    """`count` rows, one from each of `count` strata that hold equally many causal pairs (i, j).

    `visible` [rows] is the number of keys that each row sees; within its stratum a row is drawn with probability
    proportional to it, so the plain average of row means is unbiased for the mean over all pairs. Sorted, may repeat.
    """
    ends = visible.cumsum(0).double()
    share = (torch.arange(count) + _jitter(count, seed)) / count
    return torch.searchsorted(ends, share.double().to(ends.device) * ends[-1], right=True).clamp(max=len(ends) - 1)


def _jitter(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))
