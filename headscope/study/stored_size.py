"""Size of the tables that a study will store, and the time to commit them, from the rows of a few of its jobs."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from headscope.runs.arrow import Rows, from_bytes, to_arrow, to_bytes
from headscope.runs.columns import Table, all_tables
from headscope.runs.merging import ReadTable, write_merged
from headscope.study.cells import Job


@dataclass(frozen=True)
class TableCost:
    """What the rows of one job cost in a table: `file_bytes` of an almost empty file, `row_bytes` that the rows add,
    `write_seconds` to write them, and `merge_seconds` for the rows of one more job."""

    file_bytes: int
    row_bytes: int
    write_seconds: float
    merge_seconds: float


class StoredSize:
    """Predicts the size of a probe's tables, and the time to write them, from sample jobs of different cost.

    A table takes the bytes of an almost empty file, plus the bytes that the rows of each job add. The rows of a job
    grow with the logarithm of its cost, since tables are binned by position, distance or visible keys. In a table whose
    rows are averaged over documents, jobs of one model and cost share their rows.
    """

    def __init__(self) -> None:
        self._samples: dict[float, Mapping[str, TableCost]] = {}

    def add(self, job: Job, rows: Mapping[str, Rows]) -> None:
        """Add the rows of a sample job, by table."""
        self._samples[job.cost] = {name: _measure_table(all_tables()[name], rows[name]) for name in rows}

    def predict(self, jobs: Sequence[Job]) -> float:
        """Bytes of the tables of these jobs of the probe."""
        total = 0.0
        for name in self._table_names():
            total += max(tables[name].file_bytes for tables in self._samples.values() if name in tables)
            total += sum(self._at_cost(name, cost, lambda t: t.row_bytes) for cost in _row_costs(name, jobs))
        return total

    def commit_seconds(self, jobs: Sequence[Job]) -> float:
        """Seconds in which the rows of these jobs of the probe are merged and written at the end of a study."""
        total = 0.0
        for name in self._table_names():
            written = _row_costs(name, jobs)
            total += sum(self._at_cost(name, cost, lambda t: t.write_seconds) for cost in written)
            merged = 1 - len(written) / len(jobs)
            total += merged * sum(self._at_cost(name, job.cost, lambda t: t.merge_seconds) for job in jobs)
        return total

    def _table_names(self) -> set[str]:
        return {name for tables in self._samples.values() for name in tables}

    def _at_cost(self, name: str, cost: float, part: Callable[[TableCost], float]) -> float:
        """A part of the cost of a job's rows, on a line through the samples of lowest and of highest cost."""
        low, high = min(self._samples), max(self._samples)
        nothing = TableCost(0, 0, 0.0, 0.0)
        at_low, at_high = (part(self._samples[of_sample].get(name, nothing)) for of_sample in (low, high))
        if low <= 0 or low == high:
            return at_high
        slope = (at_high - at_low) / math.log(high / low)
        return max(0.0, at_high + slope * math.log(max(cost, low) / high))


def _row_costs(name: str, jobs: Sequence[Job]) -> list[float]:
    """The cost of each job that adds rows to a table; jobs of one model and cost share the rows that are averaged."""
    if all_tables()[name].mean_over_cells is None:
        return [job.cost for job in jobs]
    return [cost for _, cost in {(job.model, job.cost) for job in jobs}]


def _measure_table(table: Table, rows: Rows) -> TableCost:
    """Write one row, all rows, and the rows of two jobs, each to a file of its own."""
    stored = to_bytes(to_arrow(table, rows))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "table"
        one_row, row_seconds = _write(file, table, [lambda: from_bytes(stored).slice(0, 1)])
        size, seconds = _write(file, table, [lambda: from_bytes(stored)])
        _, twice_seconds = _write(file, table, [lambda: from_bytes(stored)] * 2)
    return TableCost(one_row, size - one_row, max(0.0, seconds - row_seconds), max(0.0, twice_seconds - seconds))


def _write(file: Path, table: Table, jobs: Sequence[ReadTable]) -> tuple[int, float]:
    """Bytes of the merged table, and the seconds in which it was written."""
    start = time.perf_counter()
    write_merged(file, table, jobs)
    return file.stat().st_size, time.perf_counter() - start
