"""Size of the tables that a study will store, from the rows of a few of its jobs, compressed as in a finished run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from headscope.runs.arrow import Rows, to_arrow, write_merged
from headscope.runs.columns import Table, all_tables
from headscope.study.cells import Job


class StoredSize:
    """Predicts the size of a probe's tables from sample jobs of different cost.

    A table takes the bytes of an almost empty file, plus the bytes that the rows of each job add. The rows of a job
    grow with the logarithm of its cost, since tables are binned by position, distance or visible keys. In a table whose
    rows are averaged over documents, jobs of one model and cost share their rows.
    """

    def __init__(self) -> None:
        self._samples: dict[float, Mapping[str, tuple[int, int]]] = {}

    def add(self, job: Job, rows: Mapping[str, Rows]) -> None:
        """Add the rows of a sample job, by table."""
        self._samples[job.cost] = {name: _compressed_size(all_tables()[name], rows[name]) for name in rows}

    def predict(self, jobs: Sequence[Job]) -> float:
        """Bytes of the tables of these jobs of the probe."""
        total = 0.0
        for name in {name for tables in self._samples.values() for name in tables}:
            total += max(tables[name][0] for tables in self._samples.values() if name in tables)
            costs: list[float] = [job.cost for job in jobs]
            if all_tables()[name].mean_over_cells is not None:
                costs = [cost for _, cost in {(job.model, job.cost) for job in jobs}]
            total += sum(self._bytes_of_rows(name, cost) for cost in costs)
        return total

    def _bytes_of_rows(self, name: str, cost: float) -> float:
        """Bytes that a job's rows add to a table, on a line through the samples of lowest and of highest cost."""
        low, high = min(self._samples), max(self._samples)
        at_low, at_high = (self._samples[of_sample].get(name, (0, 0))[1] for of_sample in (low, high))
        if low <= 0 or low == high:
            return at_high
        slope = (at_high - at_low) / math.log(high / low)
        return max(0.0, at_high + slope * math.log(max(cost, low) / high))


def _compressed_size(table: Table, rows: Rows) -> tuple[int, int]:
    """Bytes of the file of a table with one row, and what all rows add to them."""
    stored = to_arrow(table, rows)
    with TemporaryDirectory() as folder:
        one_row, all_rows = (_file_size(Path(folder) / "table", table, part) for part in (stored.slice(0, 1), stored))
    return one_row, all_rows - one_row


def _file_size(file: Path, table: Table, rows: pa.Table) -> int:
    write_merged(file, table, [rows])
    return file.stat().st_size
