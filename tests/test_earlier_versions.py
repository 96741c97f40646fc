"""Runs of other formats, and tables with other columns, are refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from headscope.errors import BadRun
from headscope.runs.columns import FORMAT_VERSION
from headscope.runs.io import sha256
from headscope.runs.manifest import write_manifest
from headscope.runs.run import Run

SHAPE = {"models": ("base",), "layers": 2, "heads": 2, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), probes=["measure"], **SHAPE)


@pytest.mark.parametrize("column", ["rows", "population"])
def test_a_table_that_lacks_a_column_is_refused(column: str, run: Run, tmp_path: Path) -> None:
    copy = tmp_path / run.name
    copy.mkdir()
    manifest = json.loads((run.path / "run.json").read_text())
    manifest["tables"] = {"attention": manifest["tables"]["attention"]}
    pq.write_table(
        pa.table(pq.read_table(run.path / "attention.parquet").drop_columns(column)), copy / "attention.parquet"
    )
    manifest["tables"]["attention"]["sha256"] = sha256(copy / "attention.parquet")
    write_manifest(copy, manifest)
    with refuses(BadRun, copy / "attention.parquet", f"'{column}'"):
        Run.open(copy).table("attention")


@pytest.mark.parametrize("version", [1, FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_other_formats_are_refused(version: int, run: Run, tmp_path: Path, refused: Callable[..., str]) -> None:
    copy = tmp_path / run.name
    copy.mkdir()
    write_manifest(copy, json.loads((run.path / "run.json").read_text()) | {"format_version": version})
    line = refused(2, "report", copy, "--out", tmp_path / "report.html")
    assert_names(line, copy, version, FORMAT_VERSION, "headscope")
