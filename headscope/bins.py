"""The log-spaced bins of visible keys and of positions, 4 per octave from 16 [ours].

Shared by whoever fills the bins (torch) and whoever reads them back (pandas); knows neither.
"""

import numpy as np
import numpy.typing as npt

PER_OCTAVE = 4
FIRST = 16
"""Upper edge of the first bin, which holds 1..16."""


def visible_edges(limit: int) -> npt.NDArray[np.int64]:
    """Upper edges [bins], in keys, of the bins that cover 1..limit: 16, 19, 23, 27, 32, 38, ...

    An edge belongs to its bin. The last edge is the first one that reaches `limit`, so it may lie above it.
    """
    steps = np.ceil(PER_OCTAVE * np.log2(max(limit, FIRST) / FIRST))
    edges = _edge(np.arange(steps + 2))
    return edges[: int(np.searchsorted(edges, limit)) + 1]


def middle(edge: npt.ArrayLike, limit: npt.ArrayLike = np.inf) -> npt.NDArray[np.float64]:
    """Geometric middle, in keys, of the bins with upper edges `edge`, when no row sees more than `limit` keys."""
    step = np.round(PER_OCTAVE * np.log2(np.divide(edge, FIRST)))
    lowest = np.where(step == 0, 1, _edge(step - 1) + 1)
    middles: npt.NDArray[np.float64] = np.sqrt(lowest * np.minimum(edge, limit))
    return middles


def last_octave(edge: npt.ArrayLike, top: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which bins lie in the octave that ends with bin `top`: rows that see more than half of its keys."""
    return np.greater(edge, np.multiply(top, 2 ** (0.5 / PER_OCTAVE - 1)))


def position_edges(length: int) -> npt.NDArray[np.int64]:
    """Last position [bins] of each bin of the predicted tokens 1..length-1, of which there is at least one.

    A token at position p is predicted from p keys, so the edges are those of `visible`; the last is length-1.
    """
    edges = visible_edges(length - 1)
    edges[-1] = length - 1
    return edges


def _edge(step: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.round(FIRST * 2 ** (step / PER_OCTAVE)).astype(np.int64)
