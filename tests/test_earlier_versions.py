"""Names and runs of earlier versions: renamed options are answered, format 3 is read, formats before it are refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

import headscope
from headscope import plugins
from headscope.errors import BadInput, BadOption, BadRun
from headscope.runs.arrow import add_absent_columns, to_arrow
from headscope.runs.columns import LAYER, OLDEST_FORMAT_VERSION, Column, Table, all_tables
from headscope.runs.io import sha256
from headscope.runs.manifest import write_manifest
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.table_checks import table_problems
from headscope.study.config import build_study

RENAMED = [
    (name, old, new)
    for name, probe in plugins.requestable_probes().items()
    for old, new in probe.options().former_names.items()
]
SHAPE = {"models": ("base",), "layers": 2, "heads": 2, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}


@pytest.mark.parametrize(("probe_name", "old", "new"), RENAMED)
def test_former_option_answers_with_its_present_name(
    probe_name: str, old: str, new: str, refused: Callable[..., str]
) -> None:
    probe = plugins.probes()[probe_name]
    fields = probe.options().model_fields
    assert new in fields
    assert old not in fields
    named = [f"'{name}'" for name in (old, probe_name, new)]
    with refuses(BadOption, *named):
        build_study({"models": {"base": "smollm2-135m"}, probe_name: {old: 1}})
    with refuses(BadInput, *named):
        getattr(headscope, probe.function_name)(**{old: 1})
    flags = [f"--{name.replace('_', '-')}" for name in (old, new)]
    assert_names(refused(2, probe.command_name, flags[0]), *flags, f"headscope {probe.command_name} --help")


def test_former_flag_that_turns_an_option_off_answers_with_its_present_name(refused: Callable[..., str]) -> None:
    assert_names(refused(2, "adapt", "--no-watch"), "--no-watch", "--no-measure-checkpoints")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of format 3: without the columns that were added since."""
    run = synthetic_run(tmp_path_factory.mktemp("runs"), probes=["positions", "measure", "weights"], **SHAPE)
    manifest = json.loads((run.path / "run.json").read_text()) | {"format_version": OLDEST_FORMAT_VERSION}
    for name, entry in manifest["tables"].items():
        file, absent = (
            run.path / f"{name}.parquet",
            [c.name for c in all_tables()[name].columns if c.absent is not None],
        )
        pq.write_table(pq.read_table(file).drop_columns(absent), file)
        entry["sha256"] = sha256(file)
    write_manifest(run.path, manifest)
    return Run.open(run.path)


def test_columns_that_a_stored_run_lacks_take_their_declared_values(run: Run) -> None:
    absent = {
        (name, c.name): c.absent for name in run.tables for c in all_tables()[name].columns if c.absent is not None
    }
    assert len([value for value in absent.values() if not isinstance(value, float)]) == 12, "besides NaN"
    for (name, column), value in absent.items():
        rows = run.table(name)
        expected = rows[value] if isinstance(value, str) else pd.Series(value, rows.index)
        np.testing.assert_array_equal(rows[column], expected)
        assert run.arrow_table(name).schema.equals(all_tables()[name].arrow)
    assert validate(run) == []


def test_a_column_that_older_runs_did_not_measure_is_nan_there_and_never_in_a_new_run() -> None:
    rate = Column("rate", "value", "", "share of something", 0, 1, absent=math.nan)
    table = Table("rates", "rates of layers", (LAYER, rate))
    old = pa.table({"layer": [0, 1]}, schema=pa.schema([table.arrow.field("layer")]))
    opened = add_absent_columns(table, old)
    assert np.isnan(opened["rate"].to_numpy()).all()
    assert table_problems(table, lambda: iter([opened])) == []
    with refuses(ValueError, "rates.rate", "NaN"):
        to_arrow(table, {"layer": [0, 1], "rate": [0.5, math.nan]})
    joined = pa.concat_tables([opened, to_arrow(table, {"layer": [2, 3], "rate": [0.5, 1.0]})])
    assert table_problems(table, lambda: iter([joined])) == []
    wrong = joined.set_column(1, table.arrow.field("rate"), pa.array([math.nan, 0.5, 7.0, math.nan], pa.float32()))
    (problem,) = table_problems(table, lambda: iter([wrong]))
    assert "rates.rate" in problem
    assert "7.0" in problem


def test_a_table_that_lacks_another_column_is_refused(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / run.name
    copy.mkdir()
    manifest = json.loads((run.path / "run.json").read_text())
    manifest["tables"] = {"attention": manifest["tables"]["attention"]}
    pq.write_table(
        pa.table(pq.read_table(run.path / "attention.parquet").drop_columns("rows")), copy / "attention.parquet"
    )
    manifest["tables"]["attention"]["sha256"] = sha256(copy / "attention.parquet")
    write_manifest(copy, manifest)
    with refuses(BadRun, copy / "attention.parquet", "'rows'"):
        Run.open(copy).table("attention")


@pytest.mark.parametrize("version", [1, 2])
def test_formats_before_the_first_release_are_refused_with_the_version_that_reads_them(
    version: int, run: Run, tmp_path: Path, refused: Callable[..., str]
) -> None:
    copy = tmp_path / run.name
    copy.mkdir()
    write_manifest(copy, json.loads((run.path / "run.json").read_text()) | {"format_version": version})
    line = refused(2, "report", copy, "--out", tmp_path / "report.html")
    assert_names(line, copy, version, OLDEST_FORMAT_VERSION, "headscope 0.2.0")
