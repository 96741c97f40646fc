"""A run of random rows of every declared table is valid, and the rows that are read are those that were written."""

from pathlib import Path

import pandas as pd
import pytest
from support.declared_rows import declared_rows
from support.synthetic_runs import synthetic_run

from benchmarks.synthetic_run import Sizes, synthetic_manifest
from headscope.base import plugins
from headscope.runs.aggregation import plain_types
from headscope.runs.columns import TableParts, all_tables
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter

SIZES = Sizes(layers=2, heads=2, groups=1, pairs=2, lengths=(64,), docs=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", all_tables())
def test_rows_of_a_declaration_are_valid_and_are_read_as_written(name: str, tmp_path: Path) -> None:
    table = all_tables()[name]
    rows = declared_rows(table, SIZES, "base")
    with RunWriter.open(tmp_path, "declared", {}) as writer:
        writer.add("all", {name: rows})
        run = writer.commit(["all"], synthetic_manifest(["base"], layers=2, heads=2, groups=1))
    assert validate(run) == []
    stored = plain_types(run.table(name))
    by_key = {"by": table.keys, "ignore_index": True} if table.keys else {"by": table.values, "ignore_index": True}
    pd.testing.assert_frame_equal(
        stored.sort_values(**by_key), rows.sort_values(**by_key), check_dtype=False, check_exact=False, rtol=1e-6
    )


def test_a_named_probe_without_plausible_rows_gets_random_ones(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, probes=("scaling",))
    tables = plugins.call_part(plugins.probes()["scaling"], TableParts.tables)
    assert {table.name for table in tables} <= {*run.tables}
