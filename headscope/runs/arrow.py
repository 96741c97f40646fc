"""Stored tables: rows to arrow in the declared schema, and back from parquet, checked. Knows nothing of runs.

Attention weights are stored as bytes: byte n > 0 is the weight 2^((n - 255) / 12), to within 3 %; byte 0 is one below
1e-4.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from headscope.errors import BadRun, did_you_mean
from headscope.runs.columns import ARROW_TYPES, Column, Table
from headscope.runs.io import REPAIR_ADVICE, read_bytes
from headscope.runs.table_checks import ColumnRange

Rows = Mapping[str, Sequence[Any] | np.ndarray | str | int | float] | pd.DataFrame
"""The columns of a table by name; a scalar is repeated for every row."""
LEVELS_PER_OCTAVE = 12
"""Levels of a stored weight between a power of two and the next one."""
MIN_LEVEL = 96
"""Level of the least stored weight, about 1e-4."""


def to_arrow(table: Table, rows: Rows) -> pa.Table:
    """`rows` as an arrow table of exactly the schema of `table`. Raises ValueError naming table and column."""
    declared = {column.name for column in table.columns}
    faults = [f"column '{name}' is missing" for name in sorted(declared - {*rows})]
    faults += [f"column '{name}' is not declared{did_you_mean(name, declared)}" for name in sorted({*rows} - declared)]
    if faults:
        raise ValueError(f"{table.name}: {', '.join(faults)}")
    columns = {name: _as_array(values) for name, values in rows.items()}
    lengths = {len(values) for values in columns.values() if isinstance(values, np.ndarray)}
    if len(lengths) != 1:
        raise ValueError(f"{table.name}: its columns have {sorted(lengths)} rows")
    arrays = []
    for column in table.columns:
        try:
            array = _column_array(column, columns[column.name], *lengths)
        except pa.ArrowException as error:
            raise ValueError(f"{table.name}.{column.name}: {error}") from error
        values_range = ColumnRange()
        values_range.add(column, array)
        if fault := values_range.problem(column, 0 if column.key else None):
            raise ValueError(f"{table.name}.{column.name}: {fault}")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=table.arrow)


def _as_array(values: Any) -> Any:
    """The cells of a column as an array; a scalar as it is."""
    if isinstance(values, str | int | float) or values is None:
        return values
    if isinstance(values, np.ndarray):
        return values
    if len(values) == 0:
        return np.empty(0)
    # numpy's own type for texts and bytes would drop trailing zeros.
    return np.asarray(values, object if isinstance(next(iter(values)), str | bytes) else None)


def _column_array(column: Column, values: Any, rows: int) -> pa.Array:
    """A column in its declared type; a scalar is repeated."""
    is_scalar = not isinstance(values, np.ndarray)
    if column.kind == "label" and is_scalar:
        return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([values], pa.string()))
    if column.kind in ("label", "text"):
        texts = [values] * rows if is_scalar else values.astype(object)
        array = pa.array(texts, pa.string(), from_pandas=True)
        return array.dictionary_encode() if column.kind == "label" else array
    return pa.array(np.full(rows, values) if is_scalar else values, ARROW_TYPES[column.kind])


def stored_rows(file: Path) -> int:
    """The number of rows of a parquet file, from its end. Raises BadRun when it is missing or not complete."""
    try:
        with file.open("rb") as stream:  # pyarrow itself opens no path that is not UTF-8
            return int(pq.read_metadata(stream).num_rows)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or "it is not a complete parquet file"
        raise BadRun(f"{file} is damaged: {reason}. {REPAIR_ADVICE}") from error


def check_footer(file: Path, rows: int) -> None:
    """Raise BadRun unless the file is a parquet file of so many rows. It reads only the end of the file."""
    if (stored := stored_rows(file)) != rows:
        raise BadRun(f"{file} is damaged: it has {stored:,} rows instead of {rows:,}. {REPAIR_ADVICE}")


def to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow stream, which is faster to write and read than parquet."""
    sink = pa.BufferOutputStream()
    # Waking threads takes longer than compressing the small tables of a job.
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_bytes(data: bytes) -> pa.Table:
    """The table that `to_bytes` wrote."""
    return pa.ipc.open_stream(data).read_all()


def read(file: Path, digest: str | None = None, repair_advice: str = REPAIR_ADVICE) -> pa.Table:
    """Read the file back. Raises BadRun when it is missing or damaged; with its `digest`, whatever bit has changed."""
    data = read_bytes(file, digest, repair_advice)
    try:
        # ParquetFile: read_table sets up a scan over several files, which takes longer than reading a small table.
        return pq.ParquetFile(pa.BufferReader(data)).read().unify_dictionaries()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadRun(f"{file} is damaged: {' '.join(str(error).split())[:200]}. {repair_advice}") from error


def select_declared(table: Table, stored: pa.Table, file: Path) -> pa.Table:
    """The columns that the table declares. Raises BadRun if `stored` lacks one or has it in another type."""
    for field in table.arrow:
        index = stored.schema.get_field_index(field.name)
        if index < 0 or not stored.schema.field(index).equals(field):
            actual = "missing" if index < 0 else str(stored.schema.field(index).type)
            raise BadRun(
                f"{file} has another schema: its column '{field.name}' is {actual}, not {field.type}. "
                "Measure the run again, or open it with the headscope version that wrote it"
            )
    return stored.select(table.arrow.names)


def stored_schema(file: Path) -> pa.Schema:
    """The schema of the file. Raises BadRun when it is missing or damaged."""
    try:
        with file.open("rb") as stream:
            return pq.read_schema(stream)
    except (pa.ArrowException, OSError) as error:
        raise BadRun(f"{file} is damaged: {' '.join(str(error).split())[:200]}. {REPAIR_ADVICE}") from error


def encode_map(pooled: npt.NDArray[Any]) -> list[bytes]:
    """The rows of a map [blocks, blocks], each up to its diagonal, as they are stored."""
    with np.errstate(divide="ignore"):
        levels = np.round(255 + LEVELS_PER_OCTAVE * np.log2(pooled)).clip(0, 255).astype(np.uint8)
    levels[levels < MIN_LEVEL] = 0
    return [row[: block + 1].tobytes() for block, row in enumerate(levels)]


def decode_map(rows: Sequence[bytes]) -> npt.NDArray[np.float64]:
    """The map [blocks, blocks] from its stored rows."""
    return decode_rows(rows, len(rows))


def decode_rows(rows: Sequence[bytes], width: int) -> npt.NDArray[np.float64]:
    """Weights [rows, width] of stored rows of at most `width` bytes, with zeros after their ends."""
    levels = np.frombuffer(b"".join(row.ljust(width, b"\0") for row in rows), np.uint8).reshape(len(rows), width)
    return np.where(levels, 2.0 ** ((levels - 255.0) / LEVELS_PER_OCTAVE), 0)
