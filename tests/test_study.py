"""Studies end to end, with a tiny checkpoint and text files: stored, resumed, refused."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import families
from support.refusals import refuses
from support.tiny_studies import (
    LENGTHS,
    StopsAfter,
    assert_clean,
    content,
    contents,
    save_checkpoint,
    save_texts,
    tokenizer,
)
from transformers.utils import logging as transformers_logging

import headscope
from headscope.base import plugins
from headscope.base.model_spec import ModelSpec
from headscope.errors import BadInput, BadOption, Interrupted, ResourceMissing
from headscope.runs.columns import all_tables
from headscope.runs.run import Run, list_runs
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter
from headscope.study import context as study_context
from headscope.study.checkpoint_glob import checkpoint_models, expand_checkpoints
from headscope.study.config import build_study, read_study
from headscope.study.executor import JobExecutor
from headscope.study.runner import run_study

MEASURED = ["attention", "pairs", "distance", "nll"]
ALL = [*MEASURED, "positions", "scales"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `tiny` and four `texts` of 60 words."""
    folder = tmp_path_factory.mktemp("study")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    return folder


@pytest.fixture(scope="module")
def study_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The study, uninterrupted."""
    return run_study(build_study(content(folder)), tmp_path_factory.mktemp("whole"))


class LoadRecorder:
    """Records the names of opened checkpoints."""

    def __init__(self, load: Callable[..., Any]):
        self.load, self.names = load, []

    def __call__(self, spec: ModelSpec, *options: Any) -> Any:
        self.names.append(spec.name)
        return self.load(spec, *options)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> LoadRecorder:
    recorder = LoadRecorder(study_context.open_checkpoint)
    monkeypatch.setattr(study_context, "open_checkpoint", recorder)
    return recorder


# Tables and run.json ------------------------------------------------------------------------------------------------


def test_a_study_fills_every_table_with_unique_keys_within_bounds(study_run: Run) -> None:
    assert sorted(study_run.tables) == sorted(ALL)
    assert validate(study_run) == []
    for name in ALL:
        assert list(study_run.table(name).columns) == [column.name for column in all_tables()[name].columns]
    for name in MEASURED:
        assert sorted(study_run.table(name)["context_length"].unique()) == LENGTHS
    heads = families.LAYERS * families.HEADS
    assert len(study_run.scales) == 2 * heads
    assert len(study_run.positions) == 2 * families.LAYERS * 2 * 8
    assert len(study_run.pairs) == 2 * len(LENGTHS) * 2 * heads * 8
    per_bin = study_run.nll.groupby(["model", "context_length", "doc"], observed=True)["tokens"].sum()
    assert (per_bin == per_bin.index.get_level_values("context_length") - 1).all()
    assert (study_run.attention["kv_group"] == study_run.attention["head"] // 2).all()


def test_models_and_lengths_share_documents(study_run: Run) -> None:
    documents = {key: set(rows["doc"]) for key, rows in study_run.attention.groupby(["model", "context_length"])}
    assert len(documents) == 4
    assert len({frozenset(names) for names in documents.values()}) == 1
    assert len(next(iter(documents.values()))) == 2


def test_schemes_of_one_checkpoint_give_different_numbers(study_run: Run) -> None:
    theta = study_run.positions.pivot_table("theta", ["layer", "kv_group", "pair"], "model", observed=True)
    assert (theta["yarn"] < theta["base"]).any()
    rms = study_run.pairs.pivot_table("rms", ["context_length", "doc", "layer", "head", "pair"], "model", observed=True)
    assert (rms["yarn"] != rms["base"]).mean() > 0.9


def test_the_per_head_table_has_one_row_per_head(study_run: Run) -> None:
    assert len(study_run.heads) == 2 * families.LAYERS * families.HEADS


def test_the_manifest_describes_the_run(study_run: Run, folder: Path) -> None:
    manifest = json.loads((study_run.path / "run.json").read_text())
    keys = {"format_version", "config", "models", "versions", "seed", "hardware", "git_commit", "tables", "timings"}
    assert keys | {"started", "finished"} <= manifest.keys()
    assert {"headscope", "torch", "transformers"} <= manifest["versions"].keys()
    base, yarn = manifest["models"]
    assert (base["label"], base["scheme"], yarn["label"], yarn["scheme"]) == ("base", "base", "yarn", "yarn:factor=4")
    assert base["spec"] == base["checkpoint"] == str(folder / "tiny")
    assert re.fullmatch("[0-9a-f]{64}", base["weights_sha256"])
    assert base["weights_sha256"] == yarn["weights_sha256"]
    assert base["step"] is None
    assert base["geometry"]["heads"] == families.HEADS
    assert base["geometry"]["numbers"] == [*range(families.LAYERS)]
    assert {"layout", "rotates", "direction", "rotary_start", "native_context"} <= base["geometry"].keys()
    for name, entry in manifest["tables"].items():
        assert entry["rows"] == len(study_run.table(name))
        assert re.fullmatch("[0-9a-f]{64}", entry["sha256"])


def test_the_config_of_a_run_is_a_valid_study(study_run: Run, folder: Path, tmp_path: Path) -> None:
    study = build_study(json.loads((study_run.path / "run.json").read_text())["config"])
    assert study == build_study(content(folder))
    (tmp_path / "study.yaml").write_text(json.dumps(study_run.manifest["config"]))
    assert read_study(tmp_path / "study.yaml", {}) == study
    assert contents(run_study(study, tmp_path / "out")) == contents(study_run)


def test_no_function_of_the_package_has_the_name_of_a_module() -> None:
    """A module headscope/measure.py would replace the function `headscope.measure` as soon as it is imported."""
    package = Path(headscope.__file__).parent
    modules = {path.stem for path in package.iterdir()}
    assert modules.isdisjoint([*headscope.__all__, *plugins.probe_functions()])


def test_another_seed_gives_other_numbers(study_run: Run, folder: Path, tmp_path: Path) -> None:
    assert contents(run_study(build_study(content(folder, seed=1)), tmp_path)) != contents(study_run)


@pytest.mark.parametrize(
    ("probes", "unused"),
    [
        ("patterns: {prompt: a b}", "(patterns)"),
        ("measure: {prompt: a b}\nattribution: {prompt: c d}", "(measure, attribution)"),
        ("measure: {lengths: [64]}\npatterns: {prompt: a b}", ""),
    ],
)
def test_texts_that_no_probe_of_a_study_file_reads_are_warned_about(
    probes: str, unused: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "study.yaml").write_text(f"texts: {{docs: 2}}\n{probes}")
    read_study(tmp_path / "study.yaml", {})
    assert ("'texts'" in caplog.text) == bool(unused)
    assert unused in caplog.text
    caplog.clear()
    (tmp_path / "study.yaml").write_text(probes)
    read_study(tmp_path / "study.yaml", {"texts": {"source": None, "docs": None}})
    assert caplog.text == ""


def test_quiet_hides_the_progress_bar_of_transformers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers_logging.enable_progress_bar()
    try:
        options = {"text": f"file:{folder}/texts/*.txt", "lengths": [16], "docs": 1, "device": "cpu"}
        headscope.measure(str(folder / "tiny"), out=tmp_path, quiet=True, **options)
        assert transformers_logging.is_progress_bar_enabled()  # as it was before
    finally:
        transformers_logging.disable_progress_bar()
    assert capsys.readouterr().err == ""


def test_hs_measure_equals_the_study_file(study_run: Run, folder: Path, tmp_path: Path) -> None:
    plan = content(folder)
    options = {"lengths": LENGTHS, "rows": 8, "device": "cpu", "quiet": True}
    run = headscope.measure(plan["models"], text=plan["texts"]["source"], docs=2, out=tmp_path, **options)
    assert contents(run) == contents(study_run)


def test_models_in_memory_are_measured_like_those_in_folders(study_run: Run, folder: Path, tmp_path: Path) -> None:
    base = headscope.load(str(folder / "tiny"), device="cpu")
    models = {"base": base, "yarn": base.with_scheme("yarn:factor=4")}
    source = f"file:{folder}/texts/*.txt"
    run = headscope.measure(models, text=source, docs=2, lengths=LENGTHS, rows=8, out=tmp_path, quiet=True)
    assert contents(run) == contents(study_run)
    assert [model["scheme"] for model in run.manifest["models"]] == ["base", "yarn:factor=4"]


def test_a_model_in_memory_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    bare = families.SPECS["llama-gqa"].build()
    with refuses(BadInput, "tokenizer"):
        headscope.measure(bare, text=f"file:{folder}/texts/*.txt", docs=2, lengths=[24], out=tmp_path, quiet=True)
    assert_clean(tmp_path)


def test_other_weights_in_memory_are_another_run(folder: Path, tmp_path: Path) -> None:
    source = f"file:{folder}/texts/*.txt"
    for seed in (0, 1):
        model = headscope.load(families.SPECS["llama-gqa"].build(seed), device="cpu", tokenizer=tokenizer())
        headscope.measure(model, text=source, docs=1, lengths=[24], tables=["nll"], out=tmp_path, quiet=True)
    hashes = {run.name.rpartition("-")[2] for _, run in list_runs(tmp_path) if isinstance(run, Run)}
    assert len(hashes) == 2


def test_one_checkpoint_under_two_schemes_is_opened_once(folder: Path, tmp_path: Path, loads: LoadRecorder) -> None:
    run_study(build_study(content(folder)), tmp_path)
    assert loads.names == [str(folder / "tiny")]


def test_checkpoints_with_equal_tokenizer_files_share_one_tokenizer(folder: Path, tmp_path: Path) -> None:
    models = {"first": folder / "tiny", "equal": tmp_path / "equal", "other": tmp_path / "other"}
    for label in ("equal", "other"):
        shutil.copytree(folder / "tiny", models[label])
    config = models["other"] / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{{ messages }}"}))
    study = build_study({**content(folder), "models": {label: str(path) for label, path in models.items()}})
    (models["equal"] / "trainer_state.json").write_text("{}")
    (models["equal"] / "tokenizer_backup").mkdir()
    context = study_context.StudyContext(study)
    assert context.tokenizer("first") is context.tokenizer("equal")
    assert context.tokenizer("first") is not context.tokenizer("other")


@pytest.mark.slow
def test_two_checkpoints_are_opened_one_after_the_other(folder: Path, tmp_path: Path, loads: LoadRecorder) -> None:
    other = save_checkpoint(tmp_path / "other", seed=1)
    plan = content(folder)
    plan["models"] |= {"other": str(other)}
    run = run_study(build_study(plan), tmp_path / "out")
    assert loads.names[:2] == [str(folder / "tiny"), str(other)]
    first, _, last = (model["weights_sha256"] for model in run.manifest["models"])
    assert first != last
    assert sorted(run.nll["model"].cat.categories) == ["base", "other", "yarn"]


# Interruptions -----------------------------------------------------------------------------------------------------


def test_a_run_with_all_work_items_stored_opens_each_checkpoint_once_to_be_committed(
    folder: Path, tmp_path: Path, loads: LoadRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of a checkpoint are not neighbours in the study."""
    tiny, other = str(folder / "tiny"), str(save_checkpoint(tmp_path / "other", seed=1))
    models = {"a": tiny, "b": other, "a yarn": f"{tiny}@yarn:factor=4", "b yarn": f"{other}@yarn:factor=4"}
    study = build_study(content(folder, models=models, measure={"lengths": [24], "rows": 8, "tables": ["nll"]}))
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "commit", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run_study(study, tmp_path / "out")
    loads.names.clear()
    run = run_study(study, tmp_path / "out", resume=True)
    assert sorted(loads.names) == sorted([tiny, other])
    assert run.models == [*models]
    assert len({model["weights_sha256"] for model in run.manifest["models"]}) == 2


def test_planning_grows_with_the_number_of_models_not_with_its_square(folder: Path) -> None:
    def calls(models: int) -> int:
        labels = {f"m{number}": str(folder / "tiny") for number in range(models)}
        executor = JobExecutor(study_context.StudyContext(build_study(content(folder, models=labels))))
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call"

        sys.setprofile(count)
        try:
            executor.plan()
        finally:
            sys.setprofile(None)
        return counted

    calls(1)  # imports, and the tokenizer's own caches
    assert calls(80) < 2.3 * calls(40)


@pytest.mark.slow
@pytest.mark.parametrize("cells", [1, 4, 9])
def test_a_run_resumed_after_ctrl_c_ends_byte_identical(
    folder: Path, study_run: Run, tmp_path: Path, cells: int
) -> None:
    plan = build_study(content(folder))
    with refuses(Interrupted, "--resume") as stop:
        run_study(plan, tmp_path, progress=StopsAfter(cells))
    assert stop.value.exit_code == 4
    (partial,) = tmp_path.iterdir()
    assert len(list((partial / "cells").iterdir())) == cells
    run = run_study(plan, tmp_path, resume=True)
    assert contents(run) == contents(study_run)
    assert run.manifest["timings"]["cells_done_now"] == 10 - cells
    assert_clean(tmp_path, run.path)


def test_ctrl_c_before_the_first_cell_stores_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run_study(build_study(content(folder)), tmp_path, progress=StopsAfter(0))
    assert_clean(tmp_path)


CHILD = """
import json, os, signal, sys, time
import torch
from probes.measure import run as measuring
from headscope.study.runner import run_study
from headscope.study.config import build_study
from headscope.study.progress import NoProgress
from headscope.study.runner import run_study

class Slow(NoProgress):
    def __init__(self, cells):
        self.cells = int(cells)

    def set_activity(self, activity, worker=""):
        if self.cells == 0:
            signal.pause()
        self.cells -= 1
        time.sleep(0.05)

torch.set_num_threads(1)
for line in sys.stdin:
    out, cells = line.split()
    child = os.fork()
    if child == 0:
        run_study(build_study(json.loads(sys.argv[1])), out, progress=Slow(cells))
        os._exit(0)
    print(child, flush=True)
    print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_bytes(
    folder: Path, study_run: Run, tmp_path: Path
) -> None:
    """One process forks a study for each kill, so that torch is imported once.

    A study pauses after some of its ten cells, so that none finishes before it is killed.
    """
    plan, rng = content(folder), random.Random(0)
    command = [sys.executable, "-c", CHILD, json.dumps(plan)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for attempt in range(10):
            out = tmp_path / str(attempt)
            print(out, rng.randrange(10), file=server.stdin)
            process = int(server.stdout.readline())
            time.sleep(rng.uniform(0, 1))
            os.kill(process, signal.SIGKILL)
            assert int(server.stdout.readline()) == signal.SIGKILL
            run = run_study(build_study(plan), out, resume=True)
            assert contents(run) == contents(study_run)
            assert validate(run) == []
            assert_clean(out, run.path)
        server.stdin.close()


# Invalid studies ------------------------------------------------------------------------------------------------------


def test_a_length_beyond_every_document_is_refused(folder: Path, tmp_path: Path) -> None:
    plan = content(folder, measure={"lengths": [24, 500]})
    with refuses(BadInput, plan["texts"]["source"], 500):
        run_study(build_study(plan), tmp_path / "out")
    assert_clean(tmp_path / "out")


def test_a_study_without_a_probe_is_refused(folder: Path, tmp_path: Path) -> None:
    with refuses(BadInput, "probe", *plugins.requestable_probes()):
        run_study(build_study(content(folder, measure=None)), tmp_path / "out")
    assert_clean(tmp_path / "out")


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        ("yarm:factor=4", ("'yarm'", "'yarn'")),
        ("yarn:factr=4", ("'factr'", "'factor'")),
        ("yarn:factor=x", ("'x'", "factor")),
    ],
)
def test_a_bad_scheme_is_refused_before_any_work(
    folder: Path, tmp_path: Path, loads: LoadRecorder, scheme: str, named: tuple[str, ...]
) -> None:
    plan = content(folder)
    plan["models"] |= {"last": f"{folder / 'tiny'}@{scheme}"}
    with refuses(BadInput, *named):
        run_study(build_study(plan), tmp_path / "out")
    assert loads.names == []
    assert_clean(tmp_path / "out")


def test_a_missing_checkpoint_is_refused_before_any_work(folder: Path, tmp_path: Path, loads: LoadRecorder) -> None:
    plan = content(folder)
    missing = tmp_path / "nowhere" / "else"
    plan["models"] |= {"last": str(missing)}
    with refuses(ResourceMissing, f"'{missing}'"):
        run_study(build_study(plan), tmp_path / "out")
    assert loads.names == []
    assert_clean(tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"modles": {}}, "", ("'modles'", "'models'")),
        ({"measure": {"lenghts": [8]}}, "", ("'measure.lenghts'", "'lengths'")),
        ({"texts": {"sorce": "x"}}, "", ("'texts.sorce'", "'source'")),
        ({"measure": {"lengths": [1]}}, "measure.lengths", (1, 2)),
        ({"measure": {"lengths": []}}, "measure.lengths", ()),
        ({"measure": {"rows": 1}}, "measure.rows", (1, 2, "exact")),
        ({"measure": {"tables": ["atention"]}}, "measure.tables", ("'atention'", "'attention'")),
        ({"models": {}, "measure": {}}, "", ("--model base=smollm2-135m",)),
        ({"name": "a/b"}, "name", ("'a/b'",)),
    ],
)
def test_the_error_for_an_invalid_study_file_gives_file_and_key(
    tmp_path: Path, changes: dict[str, Any], key: str, named: tuple[object, ...]
) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps(changes))
    with refuses(BadOption, file, key, *named) as error:
        read_study(file, {})
    assert error.value.key == key
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- a\n- b\n", "measure: {lengths: [2048]}"),
        ("measure: [", "measure: ["),
        ("\x00", "zero bytes"),
    ],
)
def test_a_file_that_is_not_a_study_is_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with refuses(BadInput, file, named):
        read_study(file, {})


def test_overrides_are_merged_into_the_file_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("texts: {docs: 7, source: 'file:x'}\nmeasure: {rows: 9}\n")
    study = read_study(tmp_path / "study.yaml", {"texts": {"docs": 3, "source": None}, "measure": {"lengths": [64, 8]}})
    assert (study.texts.docs, study.texts.source) == (3, "file:x")
    assert study.measure is not None
    assert (study.measure.rows, study.measure.lengths) == (9, [8, 64])


def test_a_probe_key_without_a_value_requests_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("measure:\nscaling:\n")
    study = read_study(tmp_path / "study.yaml", {"measure": {"rows": 9}})
    assert set(study.probe_options) == {"measure", "scaling"}
    assert study.probe_options["scaling"] == build_study({"scaling": {}}).probe_options["scaling"]
    assert study.measure is not None
    assert study.measure.rows == 9


# Checkpoints of a training run -------------------------------------------------------------------------------------


def test_checkpoints_are_ordered_by_training_step(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "last", "step-100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "step-1").mkdir()  # no checkpoint
    (tmp_path / "last" / "trainer_state.json").write_text(json.dumps({"global_step": 50}))
    specs = expand_checkpoints(f"{tmp_path}/*@yarn:factor=4")
    assert list(specs) == ["step-9", "step-10", "last", "step-100"]
    assert specs["last"] == f"{tmp_path}/last@yarn:factor=4"
    assert list(expand_checkpoints(f"{tmp_path}/step-*")) == ["step-9", "step-10", "step-100"]
    with refuses(BadInput, f"'{tmp_path}/epoch-*'", "config.json"):
        expand_checkpoints(f"{tmp_path}/epoch-*")


def test_patterns_of_several_schemes_make_a_model_of_each_with_the_scheme_in_its_label(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "config.json").write_text("{}")
    glob = f"{tmp_path}/step-*"
    assert checkpoint_models([glob, f"{glob}@yarn:factor=4"]) == {
        "step-1": f"{tmp_path}/step-1",
        "step-2": f"{tmp_path}/step-2",
        "step-1 yarn:factor=4": f"{tmp_path}/step-1@yarn:factor=4",
        "step-2 yarn:factor=4": f"{tmp_path}/step-2@yarn:factor=4",
    }
    with refuses(BadInput, "--checkpoints", "'step-2'"):
        checkpoint_models([glob, f"{tmp_path}/step-2"])


def test_patterns_of_two_trainings_have_the_training_in_their_labels(tmp_path: Path) -> None:
    for training in ("a", "b"):
        (tmp_path / training / "step-1").mkdir(parents=True)
        (tmp_path / training / "step-1" / "config.json").write_text("{}")
    models = checkpoint_models([f"{tmp_path}/a/step-*", f"{tmp_path}/b/step-*", f"{tmp_path}/b/step-*@nope"])
    assert [*models] == ["a/step-1", "b/step-1", "b/step-1 nope"]


def test_checkpoints_with_equal_names_get_distinct_labels(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "step-1").mkdir(parents=True)
        (tmp_path / parent / "step-1" / "config.json").write_text("{}")
    specs = expand_checkpoints(f"{tmp_path}/*/step-1")
    assert specs == {f"{parent}/step-1": str(tmp_path / parent / "step-1") for parent in "ab"}


def test_folder_names_may_contain_an_at_sign(tmp_path: Path) -> None:
    for name in ("me@home/step-2", "me@home/step-10", "step-1@nope"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    for scheme in ("", "@yarn:factor=4"):
        specs = expand_checkpoints(f"{tmp_path}/me@home/step-*{scheme}")
        assert specs == {name: f"{tmp_path}/me@home/{name}{scheme}" for name in ("step-2", "step-10")}
        assert list(specs) == ["step-2", "step-10"]
        all_specs = expand_checkpoints(f"{tmp_path}/**{scheme}")
        assert list(all_specs) == ["step-1@nope", "step-2", "step-10"]
        for spec in all_specs.values():
            assert ModelSpec.parse(spec).checkpoint == spec.removesuffix(scheme)
            assert ModelSpec.parse(spec).scheme.text == (scheme[1:] or "base")


def test_training_steps_are_stored_in_the_manifest(folder: Path, tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(folder / "tiny", tmp_path / f"step-{step}")
    plan = content(
        folder, models=expand_checkpoints(f"{tmp_path}/step-*"), measure={"lengths": [24], "tables": ["nll"]}
    )
    run = run_study(build_study(plan), tmp_path / "out")
    assert [(model["label"], model["step"]) for model in run.manifest["models"]] == [("step-9", 9), ("step-10", 10)]
    assert sorted(run.tables) == ["nll", "positions", "scales"]
