"""Which query rows a measure looks at, and how many keys they see: known on the host, so that no device is asked.

All rows, or N chosen with a seed; the choice never depends on the model.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord

IntArray = npt.NDArray[np.int64]

MIN_VISIBLE_KEYS = 16
"""Log-spaced rows start where a row sees this many keys: below, every octave holds only a handful of rows."""


def log_spaced_rows(length: int, count: int, seed: int) -> Tensor:
    """About `count` distinct rows of 0..length-1, one from each of `count` equal steps of ln(visible keys).

    For questions about growth with length. Sorted, int64.
    """
    low = min(MIN_VISIBLE_KEYS, length)
    visible = torch.exp(_stratified_quantiles(count, seed) * math.log(length / low)) * low
    rows: Tensor = torch.unique(visible.round().long().clamp(1, length) - 1)
    return rows


def stratified_pair_quantiles(count: int, seed: int) -> npt.NDArray[np.float64]:
    """Where among the causal pairs (i, j) the rows of `pair_spaced` lie, as shares of all pairs, ascending."""
    return _stratified_quantiles(count, seed).double().numpy()


def pair_weighted_rows(visible_counts: IntArray, pair_quantiles: npt.NDArray[np.float64]) -> IntArray:
    """Rows, one from each of as many strata as there are `shares` (`pair_shares`), all of equally many causal pairs.

    `visible` [rows] is the number of keys that each row sees; within its stratum a row is drawn with probability
    proportional to it, so the plain average of row means is unbiased for the mean over all pairs. Sorted, may repeat.
    """
    ends = visible_counts.cumsum().astype(np.float64)
    rows: IntArray = np.searchsorted(ends, pair_quantiles * ends[-1], side="right").clip(max=len(ends) - 1)
    return rows


def _stratified_quantiles(count: int, seed: int) -> Tensor:
    """One number from each of `count` equal parts of 0..1."""
    return (torch.arange(count) + torch.rand(count, generator=torch.Generator().manual_seed(seed))) / count


def query_range(record: AttentionRecord) -> slice:
    """Which rows of the document the queries are: all of them, or those of the chunk that was read."""
    last = record.first_key + record.k.shape[1]
    return slice(last - record.q.shape[1], last)


def rows_in_chunk(rows: IntArray, record: AttentionRecord) -> IntArray:
    """Those of a document's rows, which are sorted, that are queries here, as indices of the queries."""
    here = query_range(record)
    found: IntArray = rows[slice(*np.searchsorted(rows, (here.start, here.stop)))] - here.start
    return found


def count_visible_keys(record: AttentionRecord, rows: IntArray) -> IntArray:
    """How many keys these rows of a document see in this layer, whether or not they are queries here."""
    seen: IntArray = rows + 1
    if record.chunk is not None:
        seen = np.minimum(seen, rows % record.chunk + 1)
    return seen if record.window is None else np.minimum(seen, record.window)


def to_numpy(values: Tensor | IntArray) -> IntArray:
    """As they are there, where arithmetic with them waits for no device."""
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def to_device(device: torch.device, array: IntArray) -> Tensor:
    """As a tensor there."""
    return torch.from_numpy(array).to(device)
