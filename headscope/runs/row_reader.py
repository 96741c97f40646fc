"""Reads the rows of a stored table that match a filter, and no row group without them.

Tables that headscope writes are sorted by model and layer, with a row group per layer (see `merging`): reading one head
takes the time and the memory of one layer of a model. Older files are read in whole, row group by row group.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, reduce
from operator import and_
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from headscope.errors import BadRun
from headscope.runs.io import REPAIR_ADVICE, sha256

Values = Mapping[str, Collection[Any]]
"""The values by column that rows may have; columns that are not named may have any."""
CHECKED_FILES = 2**14
"""Files whose digest is remembered as long as their size and time of change stay the same."""

SETTLED_NANOSECONDS = 2 * 10**9
"""Age from which a file's time of change is taken to name its content."""


def check_digest(file: Path, digest: str, repair_advice: str = REPAIR_ADVICE) -> None:
    """Raise BadRun unless the sha256 of the file is `digest`. An unchanged file is read once per process."""
    try:
        state = file.stat()
        changed = max(state.st_mtime_ns, state.st_ctime_ns)
        # A file may change again within the resolution of its time of change.
        is_settled = time.time_ns() - changed > SETTLED_NANOSECONDS
        actual = _digest(file, changed, state.st_size) if is_settled else sha256(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadRun(f"{file} is damaged: {reason}. {repair_advice}") from error
    if actual != digest:
        raise BadRun(f"{file} is damaged: its sha256 differs from the recorded one. {repair_advice}")


@lru_cache(CHECKED_FILES)
def _digest(file: Path, changed: int, size: int) -> str:
    return sha256(file)


def read_rows(file: Path, values: Values, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows with these values, in order, and these columns, by default all. Raises BadRun for a damaged file."""
    with _open_parquet(file) as parquet, file.open("rb") as stream:
        wanted = {_column_number(parquet, name): allowed for name, allowed in values.items()}
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        numbers = [number for number, group in enumerate(groups) if _may_match(group, wanted)]
        if not numbers:
            return parquet.schema_arrow.empty_table().select(columns or parquet.schema_arrow.names)
        fragment = ds.ParquetFileFormat().make_fragment(pa.PythonFile(stream), row_groups=numbers)
        rows = fragment.to_table(columns=columns, filter=_condition(values), use_threads=False)
        return rows.unify_dictionaries()


def select_rows(rows: pa.Table, values: Values, columns: Sequence[str] | None = None) -> pa.Table:
    """Rows in memory with these values, and these columns, by default all."""
    matching = rows.filter(_condition(values)) if values else rows
    return matching.select(columns or rows.column_names)


def _condition(values: Values) -> pc.Expression | None:
    conditions = [pc.field(name).isin([*wanted]) for name, wanted in values.items()]
    return reduce(and_, conditions) if conditions else None


def read_row_groups(file: Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The rows of each row group. Raises BadRun for a damaged file."""
    with _open_parquet(file) as parquet:
        for number in range(parquet.num_row_groups):
            yield parquet.read_row_group(number, columns, use_threads=False).unify_dictionaries()


def column_range(file: Path, name: str) -> tuple[int, int] | None:
    """Least and largest value of a column, from the end of the file; None for no rows, or if the file has no such
    statistics."""
    with _open_parquet(file) as parquet:
        column = _column_number(parquet, name)
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        statistics = [group.column(column).statistics for group in groups]
    bounds = [(own.min, own.max) for own in statistics if own is not None and own.has_min_max]
    if not bounds or len(bounds) < len(statistics):
        return None
    return min(least for least, _ in bounds), max(largest for _, largest in bounds)


@contextmanager
def _open_parquet(file: Path) -> Iterator[pq.ParquetFile]:
    """The open file. Raises BadRun if it cannot be opened, or is found damaged while it is open."""
    try:
        with file.open("rb") as stream:  # pyarrow itself opens no path that is not UTF-8
            yield pq.ParquetFile(stream)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadRun(f"{file} is damaged: {' '.join(str(error).split())[:200]}. {REPAIR_ADVICE}") from error


def _may_match(row_group: pq.RowGroupMetaData, values: Mapping[int, Collection[Any]]) -> bool:
    """Whether a row group can have rows with these values, by number of the column. pyarrow compares its statistics
    with numbers only."""
    for column, wanted in values.items():
        own = row_group.column(column).statistics
        if own is not None and own.has_min_max:
            least, largest = own.min, own.max
            if not any(least <= value <= largest for value in wanted):
                return False
    return True


def _column_number(parquet: pq.ParquetFile, name: str) -> int:
    number: int = parquet.schema_arrow.get_field_index(name)
    return number
