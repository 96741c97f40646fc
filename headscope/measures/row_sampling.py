"""Which query rows a measure visits, how many at once, and how many keys they see.

A measure visits all rows or a seeded sample; the choice never depends on the model. Indices and counts are computed on
the CPU, so that no measure waits for the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.record import AttentionRecord
from headscope.base.bins import in_last_octave, visible_bin_edges

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


@dataclass(frozen=True, eq=False)
class RowSelection:
    """Query rows of a document that a measure visits in the layers of one window and chunk size.

    `rows` are sorted; a row may repeat. The document's rows fall into cells, two for each of the bins with upper edges
    `edges`: 2 b has the rows of bin b that see key 0, 2 b + 1 those from which the window or chunk hides it.
    `cell_of_row` [length] is the cell of every row of the document.
    """

    rows: IntArray
    cell_of_row: IntArray
    edges: IntArray

    def count_cells(self, rows: IntArray | slice) -> IntArray:
        """Number of these rows of the document in every cell."""
        return np.bincount(self.cell_of_row[rows], minlength=2 * len(self.edges))


def select_rows(
    length: int, log_spaced: IntArray | None, seed: int, window: int | None = None, chunk_size: int | None = None
) -> RowSelection:
    """All query rows of a document, or about as many as `log_spaced`, for layers with this window and chunk size.

    `log_spaced` are the document's `log_spaced_rows`, None for all rows. Where every row sees key 0, they are the
    selection. A window or chunk lets many rows see equally many keys, and log-spaced rows would over-weight the early
    ones. There, every cell keeps its number of log-spaced rows, at least one if its bin has any, but they are drawn
    uniformly from all rows of the cell. So cell means are unbiased estimates of those over all rows.
    """
    all_rows = np.arange(length)
    visible = visible_keys(all_rows, window, chunk_size)
    edges = visible_bin_edges(length)
    cells = 2 * np.searchsorted(edges, visible) + (visible <= all_rows)
    selection = RowSelection(all_rows, cells, edges)
    if log_spaced is None:
        return selection
    if (visible > all_rows).all():
        return RowSelection(log_spaced, cells, edges)
    counts, populations = selection.count_cells(log_spaced), selection.count_cells(all_rows)
    has_rows = np.repeat(counts.reshape(-1, 2).any(1), 2)
    counts = np.maximum(counts, has_rows & (populations > 0))
    rng = np.random.default_rng([seed, 1])  # apart from the jitter of the log-spaced rows, on which the counts depend
    drawn = [draw_evenly(np.flatnonzero(cells == cell), counts[cell], rng) for cell in np.flatnonzero(counts)]
    return RowSelection(np.sort(np.concatenate(drawn)), cells, edges)


def select_last_octave(
    length: int, n_rows: int | None, seed: int, window: int | None = None, chunk_size: int | None = None
) -> IntArray:
    """`n_rows` query rows of a document, evenly from the last octave of visible keys, or all of these. Sorted.

    The last octave consists of the rows in the last four bins that layers with this window and chunk size fill.
    """
    visible = visible_keys(np.arange(length), window, chunk_size)
    edges = visible_bin_edges(int(visible.max()))
    octave = np.flatnonzero(in_last_octave(edges[np.searchsorted(edges, visible)], edges[-1]))
    return octave if n_rows is None else draw_evenly(octave, n_rows, np.random.default_rng([seed, 2]))


def draw_evenly(rows: IntArray, count: int, rng: np.random.Generator) -> IntArray:
    """`count` of these rows, one from each of `count` equal parts, or all if there are no more. A row may repeat.

    Every row is drawn equally often on average, so that the plain mean over the drawn rows is unbiased.
    """
    if count >= len(rows):
        return rows
    quantiles = (np.arange(count) + rng.random(count)) / count
    drawn: IntArray = rows[(quantiles * len(rows)).astype(np.int64).clip(max=len(rows) - 1)]
    return drawn


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
    return visible_keys(rows, record.window, record.chunk_size)


def visible_keys(rows: IntArray, window: int | None, chunk_size: int | None) -> IntArray:
    """Number of keys that rows of a document see in layers with this window and chunk size."""
    counts: IntArray = rows + 1
    if chunk_size is not None:
        counts = np.minimum(counts, rows % chunk_size + 1)
    return counts if window is None else np.minimum(counts, window)


def items_per_tile(device: torch.device, cpu_items: int, elements_per_item: int) -> int:
    """Items to process at once: `cpu_items`, which fit the CPU's cache, or as many as the GPU tile limit allows."""
    return cpu_items if device.type == "cpu" else max(1, MAX_GPU_TILE_ELEMENTS // elements_per_item)


def to_numpy(values: Tensor | IntArray) -> IntArray:
    """The values as a numpy array on the CPU."""
    return values.cpu().numpy() if isinstance(values, Tensor) else values


def to_device(device: torch.device, array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor on the device, in a copy that nothing waits for."""
    return without_waiting(device, torch.from_numpy(array))


def copy_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, which differ in their first dimension at most, on the CPU: one copy for all."""
    if not tensors:
        return []
    joined = torch.cat([t.to(tensors[0].device) for t in tensors]).cpu()
    return [*torch.split(joined, [*map(len, tensors)])]


def sums_beside(sums: Tensor, values: Tensor) -> Tensor:
    """Accumulated sums on the device of the first values that they get; they stay there until they are read."""
    is_first = sums.device.type == "cpu" and values.device.type != "cpu"
    return without_waiting(values.device, sums) if is_first else sums


def add_by_cell(sums: Tensor, values: Tensor, cells: IntArray) -> None:
    """Add values [.., n] to sums [.., cells], both of one dtype, at `cells` [n].

    On a GPU by a product with a one-hot matrix: atomic additions would be in another order every time.
    """
    if values.device.type == "cpu":
        sums.index_add_(-1, torch.from_numpy(cells), values.to(sums.device))
    else:
        _add_by_product(sums, values, cells)


def _add_by_product(sums: Tensor, values: Tensor, cells: IntArray) -> None:
    used, column = np.unique(cells, return_inverse=True)
    columns, used_cells = to_device(sums.device, column), to_device(sums.device, used)
    one_hot = (columns[:, None] == torch.arange(len(used), device=sums.device)).to(values.dtype)
    values = values.to(sums.device)
    is_finite = values.isfinite()
    totals = values.where(is_finite, 0) @ one_hot
    is_damaged = is_finite.logical_not().to(values.dtype) @ one_hot > 0  # 0 * inf would damage every other cell
    sums.index_add_(-1, used_cells, totals.masked_fill(is_damaged, torch.nan))
