"""Reading parts of stored tables: only the row groups that are needed, the same rows, and a bounded cache."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from headscope.errors import BadRun
from headscope.runs import merging, row_reader, run_tables
from headscope.runs.aggregation import Samples
from headscope.runs.columns import all_tables
from headscope.runs.memory_cache import CachedValues, MemoryCache, memory_size
from headscope.runs.run import Run, combine_runs
from headscope.runs.run_tables import validate
from headscope.runs.summary import beyond_native_context
from probes.measure import analysis

MEASURED = ("measure", "positions")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose tables have several row groups each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "ROW_GROUP_ROWS", 200)
        folder = tmp_path_factory.mktemp("runs")
        return synthetic_run(folder, ("base", "yarn", "linear"), lengths=(256,), probes=("measure",)).path


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table counts as large."""
    monkeypatch.setattr(run_tables, "MAX_WHOLE_ROWS", 300)
    monkeypatch.setattr(run_tables, "ROWS_PER_BLOCK", 300)


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype(dict.fromkeys(frame.select_dtypes("category"), "str")).reset_index(drop=True)


FILTERS = [{"layer": 1, "head": 2}, {"model": ["yarn"]}, {"model": "base", "layer": [0, 3]}, {"layer": 99}]


@pytest.mark.parametrize("values", FILTERS, ids=str)
@pytest.mark.parametrize("name", ["distance", "attention", "pairs"])
def test_rows_of_a_large_table_are_those_of_the_whole_table(path, in_parts, name, values) -> None:
    whole, run = Run.open(path).table(name), Run.open(path)
    expected = whole
    for column, wanted in values.items():
        expected = expected[expected[column].isin(wanted if isinstance(wanted, list) else [wanted])]
    pd.testing.assert_frame_equal(plain(run.rows(name, **values)), plain(expected))
    columns = ["layer", "model"]
    pd.testing.assert_frame_equal(plain(run.rows(name, columns, **values)), plain(expected[columns]))
    assert not run._frames


HEADS = [{"layer": 1, "head": 2}, {"head": [0, 5], "layer": [3, 0], "model": "yarn"}, {"layer": 1, "head": 99}]


@pytest.mark.parametrize("values", HEADS, ids=str)
def test_rows_of_heads_are_those_of_the_whole_table_in_its_order(path, values) -> None:
    run = Run.open(path)
    expected = run.table("pairs")
    for column, wanted in values.items():
        expected = expected[expected[column].isin(wanted if isinstance(wanted, list) else [wanted])]
    pd.testing.assert_frame_equal(run.rows("pairs", **values), expected)


def test_only_row_groups_with_wanted_rows_are_read(path) -> None:
    parquet = pq.ParquetFile(path / "distance.parquet")
    wanted = {"model": ["yarn"], "layer": [2]}
    by_column = {parquet.schema_arrow.get_field_index(name): values for name, values in wanted.items()}
    groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
    numbers = [n for n, group in enumerate(groups) if row_reader._may_match(group, by_column)]
    assert 0 < len(numbers) <= 2 < parquet.num_row_groups
    rows = row_reader.read_rows(path / "distance.parquet", wanted)
    assert rows.num_rows == sum(parquet.metadata.row_group(n).num_rows for n in numbers)


def test_rows_of_combined_runs_have_the_labels_of_the_combination(path, in_parts, tmp_path) -> None:
    other = synthetic_run(tmp_path, ("base", "yarn"), lengths=(256,), probes=("measure",), seed=1)
    run = combine_runs([Run.open(path), other])
    label = next(label for label in run.models if label.endswith(other.name) or label not in ("base", "linear"))
    rows = plain(run.rows("distance", model=[label], layer=1))
    pd.testing.assert_frame_equal(
        rows, plain(run.table("distance")).query("model == @label and layer == 1").reset_index(drop=True)
    )


def plain_samples(means: pd.DataFrame) -> pd.DataFrame:
    """The table with each sample of a mean as a document and its value, which pandas can compare."""
    return means.map(lambda value: [*zip(*value, strict=True)] if isinstance(value, Samples) else value)


def test_head_statistics_by_blocks_equal_those_of_the_whole_table(path, in_parts, monkeypatch) -> None:
    in_blocks = plain_samples(analysis.head_statistics(Run.open(path)))
    native = beyond_native_context(Run.open(path))
    monkeypatch.setattr(run_tables, "MAX_WHOLE_ROWS", 10**6)
    whole = plain_samples(analysis.head_statistics(Run.open(path)))
    pd.testing.assert_frame_equal(in_blocks, whole, check_exact=True)
    assert native == beyond_native_context(Run.open(path))


def test_head_statistics_read_only_the_columns_that_they_use(path, in_parts, monkeypatch) -> None:
    columns_read, read = {}, Run._read

    def recorded(run, name, values, columns):
        columns_read[name] = {*columns}
        return read(run, name, values, columns)

    monkeypatch.setattr(Run, "_read", recorded)
    for table in ("attention", "pairs"):
        run = Run.open(path)
        run.tables = [table]
        analysis.head_statistics(run)
    assert {"log_ess2", "visible", "kv_group", "doc"} < columns_read["attention"]
    assert not columns_read["attention"] & {"ess2", "rows", "sink_rows"}
    assert {"mean_abs", "theta"} < columns_read["pairs"]
    assert not columns_read["pairs"] & {"mean_signed", "mean_abs_se"}


def test_distinct_values_of_a_large_table(path, in_parts) -> None:
    columns = ["model", "context_length", "doc"]
    expected = plain(pd.read_parquet(path / "attention.parquet")[columns]).drop_duplicates()
    found = Run.open(path).distinct("attention", columns).sort_values(columns, ignore_index=True)
    pd.testing.assert_frame_equal(found, expected.sort_values(columns, ignore_index=True))


def test_a_damaged_file_is_noticed_before_a_part_of_it_is_read(path, in_parts, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    for file in path.iterdir():
        (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "run" / "distance.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    assert len(Run.open(tmp_path / "run").rows("distance", layer=1))
    file.write_bytes(data)
    with refuses(BadRun, file, "sha256"):
        Run.open(tmp_path / "run").rows("distance", layer=1)


def test_validation_finds_equal_keys_in_different_row_groups(path, tmp_path) -> None:
    assert validate(Run.open(path)) == []
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    table = pq.read_table(path / "distance.parquet")
    repeated = table.take(np.append(np.arange(table.num_rows), [5, 700]))
    pq.write_table(repeated.cast(all_tables()["distance"].arrow), tmp_path / "distance.parquet", row_group_size=250)
    problems = validate(Run.open(tmp_path))
    (stored,) = (problem for problem in problems if str(table.num_rows) in problem)
    assert_names(stored, "distance", table.num_rows + 2, "run.json", table.num_rows)
    assert_names(problems[-1], "distance", "2 rows", "key")


def test_the_cache_drops_what_was_not_used_for_longest_and_keeps_no_large_value() -> None:
    cache, owner, other = MemoryCache(2500), CachedValues(), CachedValues()
    values = {name: np.zeros(125) for name in "abc"}  # 1000 bytes each
    assert cache.get(owner, "a", lambda: values["a"]) is values["a"]
    cache.get(other, "b", lambda: values["b"])
    assert cache.get(owner, "a", lambda: pytest.fail("computed again")) is values["a"]
    cache.get(owner, "c", lambda: values["c"])
    assert ([*owner], [*other], cache.bytes) == (["a", "c"], [], 2000)
    assert len(cache.get(owner, "large", lambda: np.zeros(10**4))) == 10**4
    assert "large" not in owner
    del owner
    assert cache.bytes == 0


def test_the_size_of_containers_counts_their_tables() -> None:
    frame = pd.DataFrame({"x": np.zeros(1000)})
    assert 8000 <= memory_size({"a": [frame]}) < 10000
    assert memory_size([frame] * 300) == pytest.approx(300 * memory_size(frame), rel=0.01)
