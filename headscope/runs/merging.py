"""Merges the tables of finished jobs into one parquet file, sorted so that a reader finds a layer of a model quickly.

Memory holds a block of rows twice, or the keys of one model at one context length in a table that is averaged over
jobs. Time is linear in the number of rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headscope.runs.columns import LAYER, LENGTH, MODEL, Column, Table
from headscope.runs.key_codes import count_repeated, key_codes

ReadTable = Callable[[], pa.Table]
"""Reads the rows that one job added to a table."""

BLOCK_ROWS = 2**21
"""Rows that are sorted in memory at once."""
ROW_GROUP_ROWS = 2**16
"""Fewest rows of a row group, except the last of a block. A row group ends with a layer of a model."""


def write_merged(file: Path, table: Table, jobs: Sequence[ReadTable]) -> int:
    """Write the rows of several jobs, in their order, as one table and return the number of rows.

    Where `table` says so, rows of equal key become their weighted mean. Rows beyond ROW_GROUP_ROWS are sorted by model
    and layer within each block.
    """
    tables = (read() for read in jobs) if table.mean_over_cells is None else _means_over_jobs(table, jobs)
    with _open_writer(file, table.arrow) as writer:
        return sum(_write_block(writer, table, parts) for parts in _blocks(tables))


def _open_writer(file: Path, schema: pa.Schema) -> pq.ParquetWriter:
    measured = [field.name for field in schema if pa.types.is_floating(field.type)]
    keys = [name for name in schema.names if name not in measured]
    # Splitting floats into their bytes makes the whole file about a third smaller.
    return pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=keys, use_byte_stream_split=measured)


def _write_block(writer: pq.ParquetWriter, table: Table, parts: list[pa.Table]) -> int:
    """Write the rows of the tables in row groups, at least one, which may be empty; empty the list; count the rows."""
    block = _concatenate(parts)
    parts.clear()  # only the copy stays in memory
    if block.num_rows <= ROW_GROUP_ROWS:
        writer.write_table(block)
        return int(block.num_rows)
    layer = key_codes(block, _keys_of(table, MODEL, LAYER))
    order = None
    if (np.diff(layer) < 0).any():
        order = np.argsort(layer, kind="stable")
        layer = layer[order]
    ends = np.append(np.flatnonzero(np.diff(layer)) + 1, len(layer))
    start = 0
    while start < len(layer):
        end = int(ends[min(int(np.searchsorted(ends, start + ROW_GROUP_ROWS)), len(ends) - 1)])
        writer.write_table(block.slice(start, end - start) if order is None else block.take(pa.array(order[start:end])))
        start = end
    return int(block.num_rows)


def _blocks(tables: Iterable[pa.Table]) -> Iterator[list[pa.Table]]:
    """The rows of the tables in order, in lists of BLOCK_ROWS rows; only the last is shorter, or empty.

    The caller may empty a list, to free its rows.
    """
    pending: list[pa.Table] = []
    room = BLOCK_ROWS
    for rows in _joined(tables):
        while rows.num_rows > room:
            pending.append(rows.slice(0, room))
            yield pending
            pending, rows, room = [], rows.slice(room), BLOCK_ROWS
        pending.append(rows)
        room -= rows.num_rows
    yield pending


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Consecutive tables joined to ROW_GROUP_ROWS rows or more: each of many small tables takes memory of its own."""
    small: list[pa.Table] = []
    row_count = 0
    for rows in tables:
        small.append(rows)
        row_count += rows.num_rows
        if row_count >= ROW_GROUP_ROWS:
            joined, small, row_count = _concatenate(small), [], 0
            yield joined
    if small:
        yield _concatenate(small)


def _means_over_jobs(table: Table, jobs: Sequence[ReadTable]) -> Iterator[pa.Table]:
    """Rows of equal key as their mean, weighted by the count column: one table per model and context length.

    Rows of equal key have equal model and length, so the sums of others need not stay in memory.
    """
    for parts in _parts_by_group(table, jobs).values():
        sums = None
        for job, slices in groupby(parts, lambda part: part[0]):
            rows = jobs[job]()
            for _, start, length in slices:
                weighted = _weighted(table, rows.slice(start, length))
                sums = _add(table, sums, weighted)
        assert sums is not None
        yield _means(table, sums)


def _parts_by_group(table: Table, jobs: Sequence[ReadTable]) -> dict[tuple[object, ...], list[tuple[int, int, int]]]:
    """The rows of each model and context length: (index of the job, first row, number of rows)."""
    names = _keys_of(table, MODEL, LENGTH)
    parts: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
    for index, read in enumerate(jobs):
        keys = read().select(names)
        starts = [0, *(np.flatnonzero(np.diff(key_codes(keys, names))) + 1).tolist()] if keys.num_rows else []
        for start, end in zip(starts, [*starts[1:], keys.num_rows], strict=True):
            group = tuple(keys.slice(start, 1).to_pylist()[0].values())
            parts.setdefault(group, []).append((index, start, end - start))
    return parts


def _keys_of(table: Table, *columns: Column) -> list[str]:
    """The names of these key columns, as far as the table has them."""
    return [column.name for column in columns if column.name in table.keys]


def _weighted(table: Table, rows: pa.Table) -> pa.Table:
    """The rows with every mean as float64, times the count."""
    count = rows[table.mean_over_cells]
    return _with_values(table, rows, lambda name: pc.multiply(rows[name].cast(pa.float64()), count.cast(pa.float64())))


def _means(table: Table, sums: pa.Table) -> pa.Table:
    """The inverse of `_weighted`, in the schema of the table."""
    count = sums[table.mean_over_cells].cast(pa.float64())
    return _with_values(table, sums, lambda name: pc.divide(sums[name], count)).cast(table.arrow)


def _with_values(table: Table, rows: pa.Table, value: Callable[[str], pa.ChunkedArray]) -> pa.Table:
    """The keys and the count of the rows with other values, by name of the column."""
    kept = {*table.keys, table.mean_over_cells}
    return pa.table({name: rows[name] if name in kept else value(name) for name in table.arrow.names})


def _add(table: Table, sums: pa.Table | None, rows: pa.Table) -> pa.Table:
    """The sums of the value columns by key; keys keep the order of their first appearance."""
    if sums is None:
        if not count_repeated(key_codes(rows, table.keys)):
            return rows
        sums = rows.slice(0, 0)
    if sums.num_rows == rows.num_rows and all(sums[name].equals(rows[name]) for name in table.keys):
        columns = {name: pc.add(sums[name], rows[name]) for name in table.values}
        return pa.table({name: columns.get(name, sums[name]) for name in table.arrow.names})
    both = _concatenate([sums, rows])
    added = both.group_by(table.keys, use_threads=False).aggregate([(name, "sum") for name in table.values])
    return added.rename_columns([*table.keys, *table.values]).select(table.arrow.names)


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()
