"""Merging the rows of jobs into sorted tables: the numbers, the order, the row groups, and the memory that it takes."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.small_runs import study

from headscope.runs import merging
from headscope.runs.arrow import to_arrow
from headscope.runs.columns import all_tables
from headscope.runs.merging import write_merged
from headscope.runs.run_tables import validate

DISTANCE, ATTENTION_LOGITS = all_tables()["distance"], all_tables()["max_logit"]
LAYERS, HEADS, PAIRS = 3, 2, 2


def profile(model, length, seed, distances=(0, 1, 2, 4)):
    """The rows of one document, by layer, head, pair and distance."""
    grid = np.meshgrid(range(LAYERS), range(HEADS), range(PAIRS), distances, indexing="ij")
    layer, head, pair, distance = (axis.ravel() for axis in grid)
    rng = np.random.default_rng(seed)
    columns = {"model": model, "context_length": length, "layer": layer, "head": head, "kv_group": 0, "pair": pair}
    values = {"mean_signed": rng.normal(size=layer.size), "n": rng.integers(1, 50, layer.size)}
    return to_arrow(DISTANCE, {**columns, "distance": distance, **values})


def merged(tmp_path, table, tables):
    file = tmp_path / "merged.parquet"
    assert write_merged(file, table, [lambda rows=rows: rows for rows in tables]) == pq.read_metadata(file).num_rows
    return pq.read_table(file).to_pandas()


def grouped_at_once(tables):
    """The weighted mean of all rows in one pandas group-by, in the order of the first appearance of a key."""
    rows = pd.concat([table.to_pandas().astype({"model": "str"}) for table in tables], ignore_index=True)
    rows["mean_signed"] = rows["mean_signed"].astype("float64") * rows["n"]
    sums = rows.groupby(DISTANCE.keys, sort=False, observed=True)[["mean_signed", "n"]].sum().reset_index()
    return sums.assign(mean_signed=(sums["mean_signed"] / sums["n"]).astype("float32"))


def assert_same_rows(rows, expected):
    frames = (frame.astype({"model": "str"}) for frame in (rows, expected))
    by_key = [frame.sort_values(DISTANCE.keys, ignore_index=True) for frame in frames]
    pd.testing.assert_frame_equal(*by_key, check_exact=True, check_dtype=False)


JOBS = {
    "by model": [("a", 16, 0), ("a", 16, 1), ("a", 32, 2), ("b", 16, 3), ("b", 16, 4)],
    "by document": [("a", 16, 0), ("b", 16, 1), ("a", 16, 2), ("b", 16, 3), ("a", 32, 4), ("a", 16, 5)],
}


@pytest.mark.parametrize("jobs", JOBS.values(), ids=JOBS)
def test_streamed_means_equal_one_group_by_in_whatever_order_jobs_come(tmp_path, jobs):
    tables = [profile(*job) for job in jobs]
    assert_same_rows(merged(tmp_path, DISTANCE, tables), grouped_at_once(tables))


def test_streamed_means_take_documents_with_other_keys(tmp_path):
    distances = [(0, 1, 2, 4), (0, 1, 2), (0, 8), (0, 1, 2, 4)]
    tables = [profile("a", 16, seed, own) for seed, own in enumerate(distances)]
    assert_same_rows(merged(tmp_path, DISTANCE, tables), grouped_at_once(tables))


def test_a_job_with_several_models_is_merged_with_the_jobs_of_each(tmp_path):
    both = pa.concat_tables([profile("a", 16, 0), profile("b", 16, 1)]).unify_dictionaries().combine_chunks()
    tables = [both, profile("b", 16, 2), profile("a", 16, 3)]
    assert_same_rows(merged(tmp_path, DISTANCE, tables), grouped_at_once(tables))


def test_rows_of_small_tables_keep_their_order_in_one_row_group(tmp_path):
    tables = [profile("b", 16, 0), profile("a", 16, 1)]
    rows = merged(tmp_path, DISTANCE, tables)
    expected = pd.concat([table.to_pandas().astype({"model": "str"}) for table in tables], ignore_index=True)
    pd.testing.assert_frame_equal(rows.astype({"model": "str"}), expected)
    assert pq.read_metadata(tmp_path / "merged.parquet").num_row_groups == 1


def logits(model, docs):
    """Rows of a table that is not averaged, by document, layer and head."""
    doc, layer, head = (axis.ravel() for axis in np.meshgrid(docs, range(LAYERS), range(HEADS), indexing="ij"))
    columns = {"model": model, "context_length": 16, "doc": doc, "layer": layer, "head": head, "kv_group": 0}
    return to_arrow(ATTENTION_LOGITS, {**columns, "max_logit": 1.0, "query": 3, "key": 2})


def test_row_groups_of_large_tables_hold_one_layer_of_one_model(tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "ROW_GROUP_ROWS", 4)
    tables = [logits(model, [doc]) for doc in ("x", "y", "z") for model in ("b", "a")]
    rows = merged(tmp_path, ATTENTION_LOGITS, tables)
    expected = pd.concat([table.to_pandas().astype({"model": "str", "doc": "str"}) for table in tables])
    key = ["model", "layer", "doc", "head"]
    rows = rows.astype({"model": "str", "doc": "str"})
    pd.testing.assert_frame_equal(
        rows.sort_values(key, ignore_index=True), expected.sort_values(key, ignore_index=True)
    )
    assert [*rows["model"].unique()] == ["b", "a"]  # in order of appearance, as before
    file = pq.ParquetFile(tmp_path / "merged.parquet")
    groups = [file.read_row_group(index).to_pandas() for index in range(file.num_row_groups)]
    assert [len(group) for group in groups] == [3 * HEADS] * 2 * LAYERS
    assert all(len(group[["model", "layer"]].drop_duplicates()) == 1 for group in groups)


@pytest.mark.parametrize("limit", [1, 3, 4])
def test_merging_in_small_blocks_gives_the_same_numbers(tmp_path, monkeypatch, limit):
    expected_run = study(tmp_path / "whole")
    monkeypatch.setattr(merging, "BLOCK_ROWS", limit)
    monkeypatch.setattr(merging, "ROW_GROUP_ROWS", 1)
    parts = study(tmp_path / "parts")
    for name in expected_run.tables:
        keys = all_tables()[name].keys
        tables = [run.table(name).astype({"model": "str"}) for run in (parts, expected_run)]
        pd.testing.assert_frame_equal(
            *(table.sort_values(keys, ignore_index=True) for table in tables), check_exact=True
        )
    assert validate(parts) == []


def test_memory_of_merging_means_does_not_grow_with_the_number_of_models(tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "BLOCK_ROWS", 64)
    monkeypatch.setattr(merging, "ROW_GROUP_ROWS", 16)

    def peak(models):
        peaks = []

        def read(model, seed):
            peaks.append(pa.total_allocated_bytes())
            return profile(f"model {model}", 16, seed, range(100))

        jobs = [lambda model=model, seed=seed: read(model, seed) for model in range(models) for seed in range(2)]
        start = pa.total_allocated_bytes()
        write_merged(tmp_path / "merged.parquet", DISTANCE, jobs)
        return max(peaks) - start

    assert peak(16) <= 1.2 * peak(4)
