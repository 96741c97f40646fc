"""Which query rows a measure visits, how many at once, and how many keys they see.

A measure visits all rows or a seeded sample; the choice never depends on the model. Indices and counts are computed on
the CPU, so that no measure waits for the device.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord

IntArray = npt.NDArray[np.int64]

MIN_VISIBLE_KEYS = 16
"""Log-spaced rows start at this many visible keys: below, every octave holds only a few rows."""
MAX_GPU_TILE_ELEMENTS = 2**28
"""Elements of the largest tensor in a tile on a GPU, 1 GiB of float32."""


def log_spaced_rows(length: int, count: int, seed: int) -> Tensor:
    """About `count` distinct rows of 0..length-1, one from each of `count` equal steps of ln(visible keys).

    For statistics as a function of length. Sorted, int64.
    """
    low = min(MIN_VISIBLE_KEYS, length)
    visible = torch.exp(_stratified_quantiles(count, seed) * math.log(length / low)) * low
    rows: Tensor = torch.unique(visible.round().long().clamp(1, length) - 1)
    return rows


def stratified_pair_quantiles(count: int, seed: int) -> npt.NDArray[np.float64]:
    """`count` stratified random quantiles in 0..1, ascending, for `pair_weighted_rows`."""
    return _stratified_quantiles(count, seed).double().numpy()


def pair_weighted_rows(visible_counts: IntArray, pair_quantiles: npt.NDArray[np.float64]) -> IntArray:
    """Rows at quantiles of all causal pairs (i, j), one row per quantile.

    `visible_counts` [rows] is the number of keys that each row sees, `pair_quantiles` come from
    `stratified_pair_quantiles`. All strata hold the same number of pairs; within its stratum a row is drawn with a
    probability proportional to its visible keys. So the plain average of row means is an unbiased estimate of the mean
    over all pairs. Sorted; a row may repeat.
    """
    ends = visible_counts.cumsum().astype(np.float64)
    rows: IntArray = np.searchsorted(ends, pair_quantiles * ends[-1], side="right").clip(max=len(ends) - 1)
    return rows


def _stratified_quantiles(count: int, seed: int) -> Tensor:
    """One random number from each of `count` equal parts of 0..1."""
    return (torch.arange(count) + torch.rand(count, generator=torch.Generator().manual_seed(seed))) / count


def query_range(record: AttentionRecord) -> slice:
    """Rows of the document that are queries of the record: all rows, or those of one chunk."""
    end = record.first_key + record.k.shape[1]
    return slice(end - record.q.shape[1], end)


def rows_in_chunk(rows: IntArray, record: AttentionRecord) -> IntArray:
    """The given rows of the document (sorted) that are queries of the record, as indices into its queries."""
    queries = query_range(record)
    indices: IntArray = rows[slice(*np.searchsorted(rows, (queries.start, queries.stop)))] - queries.start
    return indices


def count_visible_keys(record: AttentionRecord, rows: IntArray) -> IntArray:
    """Number of keys that rows of the document see in the record's layer, whether or not they are its queries."""
    counts: IntArray = rows + 1
    if record.chunk_size is not None:
        counts = np.minimum(counts, rows % record.chunk_size + 1)
    return counts if record.window is None else np.minimum(counts, record.window)


def items_per_tile(device: torch.device, cpu_items: int, elements_per_item: int) -> int:
    """Items to process at once: `cpu_items`, which fit the CPU's cache, or as many as the GPU tile limit allows."""
    return cpu_items if device.type == "cpu" else max(1, MAX_GPU_TILE_ELEMENTS // elements_per_item)


def to_numpy(values: Tensor | IntArray) -> IntArray:
    """The values as a numpy array on the CPU."""
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def to_device(device: torch.device, array: IntArray) -> Tensor:
    """The array as a tensor on the device."""
    return torch.from_numpy(array).to(device)
