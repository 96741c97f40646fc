"""Checks of a stored table part by part: its schema, NaN, values out of bounds, repeated keys.

Memory holds a row group, and the keys of the layers of models that are not complete yet: of a table that headscope
sorted, those of one model.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headscope.runs.columns import FORMAT_VERSION, LAYER, MODEL, Column, Table
from headscope.runs.key_codes import count_repeated, key_codes

ROUNDING_TOLERANCE = 1e-5
"""Tolerance for a stored float32 mean outside its bounds."""

Part = tuple[object, ...]
"""The model and the layer of rows, as far as their table has these columns."""


@dataclass
class ColumnRange:
    """Least and largest value of a column so far, and whether a value is missing."""

    least: float = math.inf
    most: float = -math.inf
    has_nan: bool = False

    def add(self, column: Column, values: pa.Array | pa.ChunkedArray) -> None:
        """Add more values of the column; texts are only checked for missing ones."""
        self.has_nan |= values.null_count > 0
        is_bounded = column.low is not None or column.high is not None
        if values.null_count or len(values) == 0 or not (is_bounded or column.kind == "value"):
            return
        numbers = values.to_numpy()
        if math.isnan(numbers.min()):
            self.has_nan = True
            numbers = numbers[~np.isnan(numbers)]
        if len(numbers):
            self.least, self.most = min(self.least, numbers.min().item()), max(self.most, numbers.max().item())

    def problem(self, column: Column, tolerance: float | None) -> str:
        """What is wrong with the values, or "". Bounds are checked unless `tolerance` is None."""
        if self.has_nan:
            return "contains NaN"
        if tolerance is None:
            return ""
        if column.low is not None and self.least < column.low - tolerance:
            return f"{self.least} is below {column.low}"
        if column.high is not None and self.most > column.high + tolerance:
            return f"{self.most} is above {column.high}"
        return ""


def table_problems(table: Table, read: Callable[[], Iterator[pa.Table]]) -> list[str]:
    """What is wrong with a stored table, one line each. `read` yields its rows in parts, each time from the start."""
    last_occurrence: dict[Part, int] = {}
    for number, rows in enumerate(read()):
        if not rows.schema.equals(table.arrow):
            return [f"{table.name}: its schema differs from that of format {FORMAT_VERSION}"]
        last_occurrence |= dict.fromkeys(_split(table, rows), number)
    ranges = {column.name: ColumnRange() for column in table.columns}
    pending: dict[Part, list[pa.Table]] = {}
    repeated = 0
    for number, rows in enumerate(read()):
        for column in table.columns:
            ranges[column.name].add(column, rows[column.name])
        for part, keys in _split(table, rows).items():
            pending.setdefault(part, []).append(keys)
            if last_occurrence[part] == number:
                repeated += count_repeated(key_codes(pa.concat_tables(pending.pop(part)), table.keys))
    checked = [(column, ranges[column.name].problem(column, ROUNDING_TOLERANCE)) for column in table.columns]
    problems = [f"{table.name}.{column.name}: {problem}" for column, problem in checked if problem]
    return [*problems, f"{table.name}: {repeated} rows have the key of another row"] if repeated else problems


def _split(table: Table, rows: pa.Table) -> dict[Part, pa.Table]:
    """The keys of the rows by part."""
    names = [column.name for column in (MODEL, LAYER) if column.name in table.keys]
    keys = rows.select(table.keys).combine_chunks()
    codes = key_codes(keys, names)
    if (np.diff(codes) < 0).any():
        order = np.argsort(codes, kind="stable")
        keys, codes = keys.take(pa.array(order)), codes[order]
    starts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist()] if len(codes) else []
    return {
        tuple(keys[name][start].as_py() for name in names): keys.slice(start, end - start)
        for start, end in zip(starts, [*starts[1:], len(codes)], strict=True)
    }
