"""Log-spaced bins of visible keys and of token positions, 4 per octave from 16 [ours], and blocks of pooled maps.

Used by the measures that fill the bins (torch) and by the analyses that read them (pandas).
"""

import math

import numpy as np
import numpy.typing as npt

BINS_PER_OCTAVE = 4
FIRST_EDGE = 16
"""Upper edge of the first bin, which holds 1..16."""

MAX_MAP_BLOCKS = 128
"""Most blocks per side of a pooled attention map."""


def map_blocks(length: int) -> tuple[int, int]:
    """Tokens per block, and number of blocks, of the pooled attention map of `length` tokens; the last may be short."""
    size = math.ceil(length / MAX_MAP_BLOCKS)
    return size, math.ceil(length / size)


def visible_bin_edges(max_visible: int) -> npt.NDArray[np.int64]:
    """Upper edges [bins], in keys, of the bins that cover 1..max_visible: 16, 19, 23, 27, 32, 38, ...

    An edge belongs to its bin. The last edge is the first one >= `max_visible`.
    """
    steps = np.ceil(BINS_PER_OCTAVE * np.log2(max(max_visible, FIRST_EDGE) / FIRST_EDGE))
    edges = _edge_at_step(np.arange(steps + 2))
    return edges[: int(np.searchsorted(edges, max_visible)) + 1]


def bin_center(edge: npt.ArrayLike, limit: npt.ArrayLike = np.inf) -> npt.NDArray[np.float64]:
    """Geometric center, in keys, of the bins with upper edges `edge`, cut off at `limit` keys."""
    step = np.round(BINS_PER_OCTAVE * np.log2(np.divide(edge, FIRST_EDGE)))
    lowest = np.where(step == 0, 1, _edge_at_step(step - 1) + 1)
    centers: npt.NDArray[np.float64] = np.sqrt(lowest * np.minimum(edge, limit))
    return centers


def in_last_octave(edge: npt.ArrayLike, top: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether each bin lies in the octave that ends with bin `top`: query rows that see more than half of its keys."""
    return np.greater(edge, np.multiply(top, 2 ** (0.5 / BINS_PER_OCTAVE - 1)))


def position_bin_edges(length: int) -> npt.NDArray[np.int64]:
    """Last position [bins] of each bin of the predicted tokens 1..length-1; needs `length` >= 2.

    The token at position p is predicted from p keys, so the edges are those of `visible_edges`; the last is length-1.
    """
    edges = visible_bin_edges(length - 1)
    edges[-1] = length - 1
    return edges


def _edge_at_step(step: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.round(FIRST_EDGE * 2 ** (step / BINS_PER_OCTAVE)).astype(np.int64)
