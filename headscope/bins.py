"""The log-spaced bins of visible keys and of positions, 4 per octave from 16 [ours].

Shared by whoever fills the bins (torch) and whoever reads them back (pandas); knows neither.
"""

import math

import numpy as np

PER_OCTAVE = 4
FIRST = 16
"""Upper edge of the first bin, which holds 1..16."""


def visible_edges(limit: int) -> np.ndarray:
    """Upper edges [bins], in keys, of the bins that cover 1..limit: 16, 19, 23, 27, 32, 38, ...

    The last edge is the first one that reaches `limit`, so it may lie above it. An edge belongs to its bin.
    """
    octaves = math.log2(max(limit, FIRST) / FIRST)
    edges = _edge(np.arange(math.ceil(octaves * PER_OCTAVE) + 2))
    return edges[: int(np.searchsorted(edges, limit)) + 1]


def middle(edge: int, limit: float = math.inf) -> float:
    """Geometric middle, in keys, of the bin whose upper edge is `edge`, cut off at `limit` keys."""
    step = round(math.log2(edge / FIRST) * PER_OCTAVE)
    lowest = 1 if step == 0 else int(_edge(np.array(step - 1))) + 1
    return math.sqrt(lowest * min(edge, limit))


def last_octave(visible: np.ndarray, top: np.ndarray) -> np.ndarray:
    """True for the bins within an octave below and including the bin `top`: rows that see over half of its keys."""
    return np.asarray(visible > top * 2 ** (0.5 / PER_OCTAVE - 1))


def position_edges(length: int) -> np.ndarray:
    """Last position [bins] of each bin of the predicted tokens 1..length-1; the last one is exactly length-1."""
    edges = visible_edges(length - 1)
    edges[-1] = length - 1
    return edges


def _edge(step: np.ndarray) -> np.ndarray:
    return np.round(FIRST * 2 ** (step / PER_OCTAVE)).astype(np.int64)
