import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.refusals import assert_names, refuses
from support.small_runs import CELLS, CONFIG, contents, interrupted, rows, study
from support.synthetic_runs import synthetic_run

from benchmarks.synthetic_run import synthetic_manifest
from headscope.base.user_input import check_path
from headscope.errors import BadInput, BadRun, CannotWrite
from headscope.results.collection import all_results
from headscope.run import Run
from headscope.runs import writer
from headscope.runs.arrow import to_arrow
from headscope.runs.columns import FORMAT_VERSION, Column, Table, all_tables
from headscope.runs.manifest import write_manifest
from headscope.runs.merging import write_merged
from headscope.runs.run import combine_runs, list_runs, open_runs
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter, join_runs

# Killed at any moment


class _Countdown:
    """Kills this process at the n-th time it touches the disk."""

    def __init__(self, steps):
        self.steps = steps

    def before(self, function):
        def step(*args, **kwargs):
            if self.steps == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps -= 1
            return function(*args, **kwargs)

        return step


def _study_killed_at_step(out, steps):
    countdown = _Countdown(steps)
    for module, name in [(os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "open")]:
        setattr(module, name, countdown.before(getattr(module, name)))
    study(out, resume=True)


def _slow_study(out, steps):
    """Waits for its end after so many steps on the disk."""
    remaining_steps = iter(range(steps))

    def slowed(function):
        def step(*args):
            if next(remaining_steps, None) is None:
                signal.pause()
            time.sleep(0.002)
            return function(*args)

        return step

    for name in ("fsync", "rename"):
        setattr(os, name, slowed(getattr(os, name)))
    study(out, resume=True)


@pytest.fixture(scope="module")
def fresh():
    """Starts processes that have imported the store but never used it, by a fork of a server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_store"])
    return context


def assert_resumes_to(reference, out):
    study(out, resume=True)
    assert [entry.name for entry in out.iterdir() if entry.name.startswith(".")] == []
    assert list_runs(out)
    for _, run in list_runs(out):
        assert contents(run) == reference
        assert validate(run) == []


@pytest.mark.slow
def test_a_run_killed_at_every_tenth_step_resumes_to_the_same_bytes_and_leaves_no_stray_file(tmp_path, fresh):
    reference = contents(study(tmp_path / "whole"))
    codes = []
    for steps in range(0, 400, 10):
        process = fresh.Process(target=_study_killed_at_step, args=(tmp_path / str(steps), steps))
        process.start()
        process.join()
        codes.append(process.exitcode)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert_resumes_to(reference, tmp_path / str(steps))
    assert codes[-1] == 0
    assert len(codes) > 5


@pytest.fixture
def python_interrupts():
    """SIGINT raises KeyboardInterrupt, whatever earlier tests of the process have set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_interrupts")
def test_a_run_interrupted_at_every_step_of_a_commit_is_finished_and_at_any_other_resumes(tmp_path, monkeypatch):
    reference, states = contents(study(tmp_path / "whole")), []
    while states[-1:] != ["uninterrupted"]:
        out, touches = tmp_path / str(len(states)), count()

        def interrupted_before(function, touches=touches):
            def step(*args, **kwargs):
                if next(touches) == len(states):
                    signal.raise_signal(signal.SIGINT)
                return function(*args, **kwargs)

            return step

        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "mkdir", "open", "listdir"):
                patch.setattr(os, name, interrupted_before(getattr(os, name)))
            patch.setattr(writer, "write_merged", interrupted_before(write_merged))
            try:
                study(out)
                states.append("uninterrupted")
            except KeyboardInterrupt:
                states.append("finished" if list_runs(out) else "unfinished")
        if states[-1] == "unfinished":
            assert_resumes_to(reference, out)
        assert [contents(run) for _, run in list_runs(out)] == [reference]
        assert [entry.name for entry in out.iterdir()] == [folder.name for folder, _ in list_runs(out)]
    assert states == sorted(states, key=["unfinished", "finished", "uninterrupted"].index)
    assert states.count("unfinished") > 10
    assert states.count("finished") > 10


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_resumes_to_the_same_bytes(tmp_path, fresh, monkeypatch, sampled):
    touched = []
    with monkeypatch.context() as patch:
        for name in ("fsync", "rename"):
            function = getattr(os, name)
            patch.setattr(os, name, lambda *args, function=function: (touched.append(args), function(*args))[1])
        reference = contents(study(tmp_path / "whole"))
    for attempt in sampled(range(10), 1):
        out, chance = tmp_path / str(attempt), random.Random(attempt)
        process = fresh.Process(target=_slow_study, args=(out, chance.randrange(len(touched))))
        process.start()
        while process.is_alive() and not out.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert_resumes_to(reference, out)


def test_resuming_after_a_kill_between_commit_and_clean_up_keeps_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_discard", lambda partial: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    run = study(tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == [run.path]


def test_without_resume_a_kill_between_commit_and_clean_up_starts_a_new_run(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_discard", lambda partial: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path)
    monkeypatch.undo()
    study(tmp_path)
    assert len(list_runs(tmp_path)) == len(list(tmp_path.iterdir())) == 2


# Writing and resuming


def test_cells_added_in_any_order_give_the_same_bytes(tmp_path):
    assert contents(study(tmp_path / "a")) == contents(study(tmp_path / "b", cells=CELLS[::-1]))


def test_rows_of_equal_key_become_their_weighted_mean(tmp_path):
    run = study(tmp_path)
    stored = run.distance
    cells = [rows(cell)["distance"] for cell in CELLS]
    assert stored["distance"].tolist() == [0, 1, 2]
    assert stored["n"].tolist() == [128, 124, 120]
    assert stored["mean_signed"].to_numpy() == pytest.approx(np.mean([c["mean_signed"] for c in cells], 0), rel=1e-6)


def test_merged_rows_weigh_by_count_and_keep_the_order_of_first_appearance(tmp_path):
    unit = {"model": "m", "context_length": 8, "layer": 0, "head": 0, "kv_group": 0, "pair": 0}
    parts = [
        {"distance": [4, 0], "mean_signed": [1.0, 5.0], "n": [1, 7]},
        {"distance": 4, "mean_signed": [2.0], "n": 3},
    ]
    with RunWriter.open(tmp_path, "test", {}) as writer:
        for cell, part in zip("ab", parts, strict=True):
            writer.add(cell, {"distance": {**unit, **part}})
        merged = writer.commit(["a", "b"], synthetic_manifest(["m"])).distance
    assert merged[["distance", "mean_signed", "n"]].to_numpy().tolist() == [[4, 1.75, 4], [0, 5, 7]]


def test_a_run_is_named_by_start_slug_and_hash_and_keeps_its_config(tmp_path):
    run = study(tmp_path)
    assert run.path.parent == tmp_path
    assert run.name.split("-", 1)[1].startswith("test-")
    assert run.manifest["config"] == CONFIG
    assert run.manifest["format_version"] == FORMAT_VERSION
    assert run.manifest["tables"]["nll"]["rows"] == 8
    assert validate(run) == []


def test_an_unfinished_run_is_continued_only_with_resume(tmp_path):
    partial = interrupted(tmp_path)
    with refuses(CannotWrite, "--resume", partial):
        study(tmp_path)
    with RunWriter.open(tmp_path, "test", CONFIG, resume=True) as writer:
        assert [writer.is_done(cell) for cell in CELLS] == [True, True, False, False]
    assert study(tmp_path, resume=True).models == ["base"]


@pytest.mark.parametrize("resume", [False, True])
def test_unfinished_work_without_run_json_is_refused_with_the_folder_to_delete(tmp_path, resume):
    partial = interrupted(tmp_path)
    (partial / "run.json").unlink()
    with refuses(BadRun, partial / "run.json", "missing", f"Delete {partial}"):
        study(tmp_path, resume=resume)


def test_a_finished_run_without_run_json_is_named_before_it_is_measured_again(tmp_path, caplog):
    run = study(tmp_path)
    (run.path / "run.json").unlink()
    with RunWriter.open(tmp_path, "test", CONFIG, resume=True) as run_writer:
        assert run_writer.find_finished({}) is None
    assert_names(caplog.text, run.path, "run.json", "measuring it again")


def test_a_file_of_another_work_item_is_damaged(tmp_path):
    partial = interrupted(tmp_path)
    first, second = sorted((partial / "cells").iterdir())
    first.write_bytes(second.read_bytes())
    resumed = RunWriter.open(tmp_path, "test", CONFIG, resume=True)
    with resumed as writer, refuses(BadRun, first, "another work item", "--resume"):
        [writer.is_done(cell) for cell in CELLS]


def test_a_run_killed_before_its_first_cell_is_started_again_without_resume(tmp_path):
    partial = interrupted(tmp_path)
    for cell in (partial / "cells").iterdir():
        cell.unlink()
    study(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_table_of_a_later_minor_format_is_named_by_validate(tmp_path):
    run = study(tmp_path)
    run.manifest["tables"]["novel"] = {"rows": 1, "sha256": ""}
    later = Run(run.path, run.manifest)
    (problem,) = validate(later)
    assert_names(problem, "novel", "newer headscope")
    (note,) = (result for result in all_results(later) if result.question == "models.unread_tables")
    assert note.details["tables"] == ["novel"]


def test_work_that_was_stored_before_a_column_existed_is_refused(tmp_path, monkeypatch):
    old = all_tables()["nll"]
    new = Table(old.name, old.meaning, (*old.columns, Column("spread", "value", "", "spread of the loss")))
    with RunWriter.open(tmp_path, "test", {}) as run_writer:
        run_writer.add("before", {"nll": rows(CELLS[0])["nll"]})
        monkeypatch.setattr(writer, "all_tables", lambda: all_tables() | {"nll": new})
        run_writer.add("after", {"nll": rows(CELLS[1])["nll"] | {"spread": 0.5}})
        with refuses(BadRun, run_writer.partial_path, "'spread'"):
            run_writer.commit(["before", "after"], synthetic_manifest(("base",)))


def test_other_config_does_not_continue_an_unfinished_run(tmp_path):
    interrupted(tmp_path)
    study(tmp_path, config={"docs": 5})
    assert len(list(tmp_path.glob(".test-*.partial"))) == 1


def test_resume_without_an_unfinished_run_starts_a_new_run(tmp_path):
    first, second = study(tmp_path, resume=True), study(tmp_path, resume=True)
    assert first.path != second.path
    assert [path for path, _ in list_runs(tmp_path)] == [second.path, first.path]


def test_a_second_writer_of_the_same_run_is_refused(tmp_path):
    with RunWriter.open(tmp_path, "test", CONFIG) as writer:
        with refuses(CannotWrite, writer.partial_path, "process"):
            RunWriter.open(tmp_path, "test", CONFIG, resume=True)
        writer.add(CELLS[0], rows(CELLS[0]))


def test_run_stopped_before_its_first_cell_leaves_no_files(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunWriter.open(tmp_path, "test", CONFIG):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_commit_with_a_missing_cell_raises_value_error(tmp_path):
    with RunWriter.open(tmp_path, "test", CONFIG) as writer:
        writer.add(CELLS[0], rows(CELLS[0]))
        with pytest.raises(ValueError, match="base/1"):
            writer.commit(CELLS, synthetic_manifest(["base"]))


# A disk that refuses


def _full(*_, **__):
    raise OSError(errno.ENOSPC, "Error writing bytes to file")


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_full_disk_at_the_start_leaves_no_files(tmp_path, monkeypatch, name):
    rename = os.rename
    monkeypatch.setattr(os, name, lambda a, *b: rename(a, *b) if str(b).count(".trash") else _full())
    with refuses(CannotWrite, tmp_path, os.strerror(errno.ENOSPC)) as refusal:
        study(tmp_path)
    assert "--out" not in str(refusal.value), "the advice is to free space"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_full_while_a_cell_is_written_keeps_the_finished_ones(tmp_path, monkeypatch):
    with RunWriter.open(tmp_path, "test", CONFIG) as writer:
        writer.add(CELLS[0], rows(CELLS[0]))
        monkeypatch.setattr(Path, "write_bytes", _full)
        with refuses(CannotWrite, tmp_path, os.strerror(errno.ENOSPC)):
            writer.add(CELLS[1], rows(CELLS[1]))
        monkeypatch.undo()
    (partial,) = tmp_path.iterdir()
    assert sorted(entry.name for entry in partial.iterdir()) == ["cells", "lock", "run.json"]
    assert contents(study(tmp_path, resume=True)) == contents(study(tmp_path / "whole"))


def test_a_disk_full_during_commit_publishes_nothing_and_keeps_the_cells(tmp_path, monkeypatch):
    with RunWriter.open(tmp_path, "test", CONFIG) as writer:
        for cell in CELLS:
            writer.add(cell, rows(cell))
        monkeypatch.setattr(os, "fsync", _full)
        with refuses(CannotWrite, tmp_path, os.strerror(errno.ENOSPC)):
            writer.commit(CELLS, synthetic_manifest(["base"]))
    monkeypatch.undo()
    assert list_runs(tmp_path) == []
    assert contents(study(tmp_path, resume=True)) == contents(study(tmp_path / "whole"))


def test_an_out_that_is_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "runs"):
        with refuses(CannotWrite, out, "--out") as refusal:
            study(out)
        assert "\n" not in str(refusal.value)


# Rows that break the schema


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"nll": [1.0, float("nan")]}, ("nll.nll", "NaN")),
        ({"doc": ["a", None]}, ("nll.doc", "NaN")),
        ({"position": [-1, 3]}, ("nll.position", -1, 0)),
        ({"context_length": 0}, ("nll.context_length", 0, 1)),
        ({"position": [1.5, 3.0]}, ("nll.position",)),
        ({"position": [2**40, 3]}, ("nll.position",)),
        ({"doc": [1, 2]}, ("nll.doc",)),
        ({"loss": 1.0}, ("nll", "'loss'")),
    ],
)
def test_rows_that_break_the_schema_are_refused_by_table_and_column(change, named):
    with refuses(ValueError, *named):
        to_arrow(all_tables()["nll"], rows(CELLS[0])["nll"] | change)


def test_a_missing_column_is_refused_by_name():
    with pytest.raises(ValueError, match="tokens"):
        to_arrow(all_tables()["nll"], pd.DataFrame(rows(CELLS[0])["nll"]).drop(columns="tokens"))


def test_infinities_are_stored_as_values():
    positions = {"model": "m", "context_length": 0, "layer": 0, "kv_group": 0, "pair": [0], "theta": 0.0}
    logs = {"log_theta": -np.inf, "log_theta_init": -np.inf, "log_theta_base": 0.0}
    table = to_arrow(all_tables()["positions"], positions | logs)
    assert table["log_theta"].to_pylist() == [-np.inf]
    assert table.schema.equals(all_tables()["positions"].arrow, check_metadata=True)


# Reading


def test_texts_keep_zero_characters_at_their_end():
    stored = to_arrow(all_tables()["nll"], rows(CELLS[0])["nll"] | {"doc": ["a\0", "b"]})
    assert stored["doc"].to_pylist() == ["a\0", "b"]


@pytest.mark.slow
def test_tables_come_back_as_written_with_labels_in_order_of_appearance(tmp_path):
    run = synthetic_run(tmp_path, models=("zeta", "alpha"))
    assert run.models == list(run.attention["model"].cat.categories) == ["zeta", "alpha"]
    assert list(run.tables) == [name for name in all_tables() if name in run.tables]
    assert run.attention is run.table("attention")
    assert validate(run) == []
    assert "alpha" in run._repr_html_()
    assert "nll" in dir(run)


def test_folder_that_is_not_a_run_is_refused_in_one_line(tmp_path):
    partial = interrupted(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('{"format_version": ')
    for path, named in [
        (tmp_path / "none", (tmp_path / "none",)),
        (partial, (partial, "run.json", "tables", "models")),
        (tmp_path / "broken", (tmp_path / "broken" / "run.json", "line 1")),
    ]:
        with refuses(BadRun, *named) as refusal:
            Run.open(path)
        assert "\n" not in str(refusal.value)


def test_a_newer_format_is_refused_by_version(tmp_path):
    run = study(tmp_path)
    facts = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(facts | {"format_version": FORMAT_VERSION + 1}))
    with refuses(BadRun, run.path, FORMAT_VERSION + 1, FORMAT_VERSION):
        Run.open(run.path)
    ((path, reason),) = list_runs(tmp_path)
    assert path == run.path
    assert isinstance(reason, BadRun)


def test_a_missing_table_is_refused_with_the_list_of_tables(tmp_path):
    with refuses(BadRun, "'attention'", "distance", "nll"):
        _ = study(tmp_path).attention
    with pytest.raises(AttributeError, match="headz"):
        _ = study(tmp_path).headz


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" + data[:-1]]
)
def test_a_damaged_table_is_refused_by_file(tmp_path, damage):
    run = study(tmp_path)
    file = run.path / "nll.parquet"
    file.write_bytes(damage(file.read_bytes()))
    with refuses(BadRun, file):
        _ = run.nll
    assert any("nll.parquet" in problem for problem in validate(run))
    assert len(run.distance) == 3


@pytest.mark.parametrize(
    "change", [{"inputs": 5}, {"inputs": {"a": [1]}}, {"versions": 5}, {"hardware": 3}, {"started": 5}]
)
def test_a_manifest_with_a_value_of_another_kind_is_refused(tmp_path, change):
    run = study(tmp_path)
    write_manifest(run.path, {**run.manifest, **change})
    with refuses(BadRun, run.path / "run.json", next(iter(change))):
        Run.open(run.path)


def test_validate_names_a_model_of_a_table_that_the_manifest_lacks(tmp_path):
    run = study(tmp_path)
    write_manifest(run.path, {**run.manifest, "models": []})
    problems = validate(Run.open(run.path))
    assert [problem for problem in problems if problem.startswith("nll: run.json has no model")]
    assert len(problems) == len(run.tables)


def test_a_tilde_in_a_path_is_the_home_folder(tmp_path, monkeypatch):
    run = study(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Run.open(f"~/{run.path.name}").path == run.path
    with refuses(BadInput, "out", "''"):
        check_path("", "out")


def test_a_link_to_itself_is_no_run(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    with refuses(BadRun, link):
        open_runs([link])


def _restored(run, **columns):
    """The run with other values in nll, as if someone had edited the file."""
    table = pq.read_table(run.path / "nll.parquet")
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), pa.array(values))
    pq.write_table(table, run.path / "nll.parquet")
    return run


def test_validate_finds_edits_nan_bounds_and_repeated_keys(tmp_path):
    nll = pa.array([np.nan] + [2.0] * 7, pa.float32())
    for name, columns, named in (
        ("a", {"nll": nll}, ("nll.nll", "NaN")),
        ("b", {"nll": pa.array([-1.0] * 8, pa.float32())}, ("nll.nll", -1.0, 0)),
        ("c", {"position": pa.array([31] * 8, pa.int32())}, ("nll", "4 rows")),
    ):
        changed_file, wrong_values = validate(_restored(study(tmp_path / name), **columns))
        assert_names(changed_file, "nll", "sha256", "run.json")
        assert_names(wrong_values, *named)


def test_validate_tolerates_float32_rounding(tmp_path):
    run = _restored(study(tmp_path), nll=pa.array([-1e-6] * 8, pa.float32()))
    (changed_file,) = validate(run)
    assert_names(changed_file, "nll", "sha256", "run.json")


# Several runs


def at(run, time):
    """The run as if it had been made at that time, which is the beginning of its name."""
    return Run.open(run.path.rename(run.path.with_name(time + run.name[len(time) :])))


@pytest.mark.slow
def test_a_label_that_two_runs_measured_is_two_models(tmp_path):
    first_label, second_label = "base · synthetic 01-01 08:30", "base · synthetic 01-01 09:00"
    first = at(synthetic_run(tmp_path, models=("base", "yarn")), "20260101T083000Z")
    second = at(synthetic_run(tmp_path, models=("base", "ntk"), seed=1), "20260101T090000Z")
    joined = combine_runs([first, second])
    assert joined.models == [first_label, "yarn", second_label, "ntk"]
    assert len(joined.attention) == len(first.attention) + len(second.attention)
    for label, run in ((first_label, first), (second_label, second)):
        label_rows = joined.attention[joined.attention["model"] == label]
        assert label_rows["ess2"].tolist() == run.attention[run.attention["model"] == "base"]["ess2"].tolist()
    assert joined.parts == [first, second]
    assert len(joined.heads) == 4 * 24
    assert joined.conflicting_row_counts == {}


@pytest.mark.slow
def test_runs_of_one_name_in_two_folders_are_two_models_and_one_run_named_twice_is_refused(tmp_path):
    runs = [synthetic_run(tmp_path / name, models=("base",), seed=seed) for seed, name in enumerate("ab")]
    same = [Run.open(run.path.rename(run.path.with_name("r"))) for run in runs]
    joined = combine_runs(same)
    assert joined.models == ["base · r (1)", "base · r (2)"]
    assert len(joined.heads) == 2 * 24
    with refuses(BadInput, f"'{same[0].path}'"):
        open_runs([same[0].path, same[0].path / ".." / "r"])


@pytest.mark.slow
def test_runs_with_different_tables_of_one_model_combine_into_one_model(tmp_path):
    full_run = synthetic_run(tmp_path)
    tables = full_run.manifest["tables"]
    shared = {"positions", "scales"}
    some = Run(
        full_run.path, {**full_run.manifest, "tables": {k: v for k, v in tables.items() if k in {"nll", *shared}}}
    )
    run_without_nll = Run(
        full_run.path, {**full_run.manifest, "tables": {k: v for k, v in tables.items() if k != "nll"}}
    )
    joined = combine_runs([some, run_without_nll])
    assert joined.models == full_run.models
    assert set(joined.tables) == set(tables)
    assert all(len(joined.table(name)) == len(full_run.table(name)) for name in tables)
    first = Run(full_run.path, {**run_without_nll.manifest, "models": full_run.manifest["models"][:1]})
    assert combine_runs([some, first]).models == full_run.models, "each where it stood first"


@pytest.mark.slow
def test_one_label_with_two_adapters_is_two_models_whatever_was_measured_of_each(tmp_path):
    full_run = synthetic_run(tmp_path)
    tables, models = full_run.manifest["tables"], full_run.manifest["models"]
    some = Run(full_run.path, {**full_run.manifest, "tables": {name: tables[name] for name in ("nll", "scales")}})
    learned = [{**models[0], "adapter_sha256": "c" * 64}, *models[1:]]
    run_without_nll = {"tables": {k: v for k, v in tables.items() if k != "nll"}, "models": learned}
    joined = combine_runs([some, Run(full_run.path, {**full_run.manifest, **run_without_nll})])
    assert "base" not in joined.models
    assert "yarn" in joined.models


def test_documents_of_all_combined_runs_are_known_and_another_text_of_one_name_is_another_model(tmp_path):
    full_run = synthetic_run(tmp_path)
    tables, models = full_run.manifest["tables"], full_run.manifest["models"]

    def part(names: set[str], documents: dict[str, str]) -> Run:
        content = {"tables": {name: tables[name] for name in names}}
        entries = [{**model, "documents_sha256": documents} for model in models]
        return Run(full_run.path, {**full_run.manifest, **content, "models": entries})

    first = part({"nll"}, {"hamlet": "a"})
    joined = combine_runs([first, part({"attention"}, {"hamlet": "a", "macbeth": "b"})])
    assert joined.manifest["models"][0]["documents_sha256"] == {"hamlet": "a", "macbeth": "b"}
    assert joined.models == full_run.models
    assert "base" not in combine_runs([first, part({"attention"}, {"hamlet": "c"})]).models


def test_conflicting_rows_without_a_model_are_reported_when_runs_are_joined(tmp_path):
    rows = {"scheme": "nope", "regime": "i", "exponent": 0.9, "beta": 2.0, "context_length": [10, 20], "seed": 0}
    runs = []
    for target in (63.0, 64.0):
        with RunWriter.open(tmp_path, "scaling", {"target": target}) as writer:
            same = {**rows, "scale": 1.0, "ess": 70.0, "ratio": 1.1}
            writer.add("all", {"scaling": pd.DataFrame({**same, "target": [60.0, target]})})
            runs.append(writer.commit(["all"], synthetic_manifest(())))
    joined = combine_runs(runs)
    assert joined.conflicting_row_counts == {"scaling": 1}
    assert joined.scaling["target"].tolist() == [60.0, 63.0]


def test_joining_a_single_run_is_refused(tmp_path):
    run = study(tmp_path)
    assert combine_runs([run]) is run


def test_one_label_over_two_checkpoints_is_two_models(tmp_path):
    first = study(tmp_path)
    shutil.copytree(first.path, tmp_path / "copy")
    write_manifest(tmp_path / "copy", json.loads(json.dumps(first.manifest).replace("a" * 64, "b" * 64)))
    joined = combine_runs([Run.open(tmp_path / "copy"), first])
    assert joined.models[0] == "base · copy"
    assert f"base · {first.name}" in joined.models


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"geometry": {"layers": 9, "heads": 2, "kv_groups": 1}},
        {"tokenizer_sha256": "b"},
        {"lora": "x"},
    ],
    ids=str,
)
def test_one_label_with_another_dtype_geometry_or_tokenizer_is_two_models(tmp_path, change):
    first = study(tmp_path)
    shutil.copytree(first.path, tmp_path / "copy")
    manifest = json.loads(json.dumps(first.manifest))
    original = {"dtype": "float32", "tokenizer_sha256": "a", "lora": "y"}
    manifest["models"][0] |= change
    first.manifest["models"][0] |= {key: value for key, value in original.items() if key in change}
    write_manifest(first.path, first.manifest)
    write_manifest(tmp_path / "copy", manifest)
    assert combine_runs([Run.open(tmp_path / "copy"), Run.open(first.path)]).models[0] == "base · copy"


# Several runs stored as one -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_joined_run_stores_the_combined_tables(tmp_path):
    shape = {"layers": 2, "heads": 2, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
    parts = [synthetic_run(tmp_path, models=(name,), seed=seed, **shape) for seed, name in enumerate("ab")]
    stored, combined = join_runs(parts, tmp_path, "both"), combine_runs(parts)
    assert validate(stored) == []
    assert stored.models == combined.models == ["a", "b"]
    for name in combined.tables:
        ours, second_label = (
            run.table(name).sort_values(all_tables()[name].keys, ignore_index=True) for run in (stored, combined)
        )
        pd.testing.assert_frame_equal(ours, second_label, check_categorical=False, obj=name)
    pd.testing.assert_frame_equal(stored.heads, combined.heads)
    assert {*stored.manifest["config"]["joined"]} == {run.name for run in parts}


@pytest.mark.slow
def test_join_killed_before_its_commit_can_be_repeated(tmp_path, monkeypatch):
    shape = {"layers": 2, "heads": 2, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
    parts = [synthetic_run(tmp_path, models=(name,), seed=seed, **shape) for seed, name in enumerate("ab")]

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            join_runs(parts, tmp_path, "both")
    assert validate(join_runs(parts, tmp_path, "both")) == []


@pytest.mark.slow
def test_runs_that_cannot_be_joined_are_refused_and_nothing_is_written(tmp_path):
    run = synthetic_run(tmp_path, models=("a",), layers=2, heads=2, groups=2, pairs=2, lengths=(256,), docs=2)
    for parts in ([run], [run, run]):
        with refuses(BadInput, "join"):
            join_runs(parts, tmp_path / "out", "both")
    assert not (tmp_path / "out").exists()
