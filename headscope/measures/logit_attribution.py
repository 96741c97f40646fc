"""What each head adds to a logit directly: its output through its part of the output projection, along a direction.

The residual stream is a sum, so the logit of a token is one too once the norms on the way are frozen at the scale that
they had. The direction of a row is what a unit of the stream adds to the logit of the token that comes next there.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.bins import position_bin_edges
from headscope.measures.copying import last_query_weights

ROWS_PER_PRODUCT = 2048
"""Rows whose product is held at once."""


def direct_logit_attribution(z: Tensor, projection: Tensor, directions: Tensor) -> Tensor:
    """(z_h W_h) . u of every head and row: [H, rows], float32.

    z [H, rows, d] are the outputs of the heads, `projection` [D, H d] the weight that mixes them into the stream, and
    `towards` [rows, D] the direction of each row.
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


def last_query_outputs(record: AttentionRecord, spans: Tensor) -> Tensor:
    """The output of every head at the last query, and the part of it that comes through the keys of each span.

    `spans` [S, 2] index the keys, which are all of the sequence. [1 + S, H, dv], float32: z, then the sums over each
    span of weight times value.
    """
    _, weights = last_query_weights(record)
    values = record.v.float()
    of_groups = weights.view(len(values), -1, weights.shape[-1])
    parts = [record.z[:, -1].float()]
    for start, end in spans.tolist():
        parts.append((of_groups[..., start:end] @ values[:, start:end]).flatten(0, 1))
    return torch.stack(parts)


class AttributionByPosition:
    """Sums of terms of the next token's logit over log-spaced bins of its position 1..length-1, in float64."""

    def __init__(self, length: int):
        self.edges = torch.from_numpy(position_bin_edges(length))
        self.token_bins = torch.bucketize(torch.arange(1, length), self.edges)
        self.token_counts = torch.bincount(self.token_bins, minlength=len(self.edges))

    def bin_means(self, contributions: Tensor) -> Tensor:
        """Mean of `terms` [..., length - 1] over each bin: [..., bins], float64."""
        sums = torch.zeros(*contributions.shape[:-1], len(self.edges), dtype=torch.float64)
        sums.index_add_(-1, self.token_bins, contributions.double().cpu())
        return sums / self.token_counts

    def table_columns(self, contributions: Tensor, **places: np.ndarray) -> Mapping[str, np.ndarray]:
        """Columns position, contribution and tokens of terms [n, length - 1], beside `places` [n] of each."""
        bins = len(self.edges)
        return {
            **{name: np.repeat(place, bins) for name, place in places.items()},
            "position": np.tile(self.edges.numpy(), len(contributions)),
            "contribution": self.bin_means(contributions).reshape(-1).numpy(),
            "tokens": np.tile(self.token_counts.numpy(), len(contributions)),
        }
