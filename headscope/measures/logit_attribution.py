"""Direct logit attribution: what each head adds to a logit through its slice of the output projection.

The residual stream is a sum, so the logit of a token is a sum too once the norms are frozen at the scale that they had.
The direction of a row is the gradient of its next token's logit with respect to the residual stream.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.base.bins import position_bin_edges

ROWS_PER_PRODUCT = 2048
"""Rows whose products are in memory at once."""


def direct_logit_attribution(z: Tensor, projection: Tensor, directions: Tensor) -> Tensor:
    """Direct logit attribution (z_h W_h) . u of every head and row: [H, rows], float32.

    z [H, rows, d] are the head outputs, `projection` [D, H d] is the weight of the output projection, and `directions`
    [rows, D] hold the direction u of each row.
    """
    heads, _, dim = z.shape
    matrix = projection.float()
    return torch.cat(
        [
            torch.linalg.vecdot((u @ matrix).view(-1, heads, dim), part.transpose(0, 1).float()).T
            for u, part in zip(
                torch.split(directions, ROWS_PER_PRODUCT), torch.split(z, ROWS_PER_PRODUCT, dim=1), strict=True
            )
        ],
        1,
    )


def last_query_outputs(record: AttentionRecord, weights: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Output of every head at the last query, and its part from the keys of each span: [1 + S, H, dv], float32.

    `weights` [H, Lk] are those of the last query (`last_query_weights`), `spans` S first and end indices of keys. The
    first entry is z; the others are the sums over each span of weight times value.
    """
    values = record.v.float()
    group_weights = weights.view(len(values), -1, weights.shape[-1])
    parts = [record.z[:, -1].float()]
    for start, end in spans:
        parts.append((group_weights[..., start:end] @ values[:, start:end]).flatten(0, 1))
    return torch.stack(parts)


class AttributionByPosition:
    """Means of contributions to the next token's logit over log-spaced bins of its position 1..length-1.

    With `by_token` every position is a bin of its own.
    """

    def __init__(self, length: int, by_token: bool = False):
        self.edges = torch.arange(1, length) if by_token else torch.from_numpy(position_bin_edges(length))
        self.token_bins = torch.bucketize(torch.arange(1, length), self.edges)
        self.token_counts = torch.bincount(self.token_bins, minlength=len(self.edges))

    def bin_means(self, contributions: Tensor) -> Tensor:
        """Mean of `contributions` [..., length - 1] over each bin: [..., bins], float64."""
        sums = torch.zeros(*contributions.shape[:-1], len(self.edges), dtype=torch.float64)
        sums.index_add_(-1, self.token_bins, contributions.double().cpu())
        return sums / self.token_counts

    def table_columns(self, contributions: Tensor, **key_columns: np.ndarray) -> Mapping[str, np.ndarray]:
        """Columns position, contribution and tokens of contributions [n, length - 1], after the key columns [n]."""
        bins = len(self.edges)
        return {
            **{name: np.repeat(column, bins) for name, column in key_columns.items()},
            "position": np.tile(self.edges.numpy(), len(contributions)),
            "contribution": self.bin_means(contributions).reshape(-1).numpy(),
            "tokens": np.tile(self.token_counts.numpy(), len(contributions)),
        }
