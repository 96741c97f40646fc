"""Resuming runs: only from the same inputs; a finished run is not measured again."""

import copy
import hashlib
import json
import logging
import random
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support import families
from support.adapters import noisy
from support.refusals import assert_names, refuses
from support.tiny_studies import PROBES, StopsAfter, content, contents, record_versions, save_checkpoint, save_texts
from transformers import LlamaForCausalLM

import headscope as hs
from headscope.errors import BadInput, BadRun, InputChanged, Interrupted
from headscope.models import checkpoint
from headscope.rendering import notebook
from headscope.runs.io import sha256
from headscope.runs.manifest import write_manifest
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter
from headscope.study import context, runner
from headscope.study.config import build_study


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint `tiny`, four `texts` of 130 words, an adapter and a needle."""
    save_checkpoint(tmp_path / "tiny")
    save_texts(tmp_path / "texts", 130)
    noisy(hs.load(str(tmp_path / "tiny"), device="cpu")).save(tmp_path / "adapter.safetensors")
    write_needle(tmp_path, "w120 w121 w122")
    return tmp_path


def write_needle(folder: Path, fact: str) -> None:
    needle = {"name": "one", "question": "w1", "opening": "w2 w3", "fact": fact}
    (folder / "needle.jsonl").write_text(json.dumps(needle))


def study_of(folder: Path, probe: str) -> Any:
    tiny = str(folder / "tiny")
    models = {"base": tiny, "learned": f"{tiny}@adarope:adapter={folder}/adapter.safetensors,weights=any"}
    options = json.loads(json.dumps(PROBES.get(probe, {probe: {}})))
    if probe == "detectors":
        options["detectors"] = {"periods": [16], "sequences": 1}
    if probe == "needle":
        options["needle"]["file"] = str(folder / "needle.jsonl")
    if probe == "adapt":
        models = {"base": tiny}
        options["adapt"]["training_texts"] = [f"file:{folder}/texts/*.txt"]
    return build_study(content(folder, models=models, measure=None) | options)


def interrupted_run(folder: Path, probe: str, cells: int = 1) -> Path:
    """Run the study of a probe, interrupt it after some cells and return its partial directory."""
    with pytest.raises(Interrupted):
        runner.run_study(study_of(folder, probe), folder / "runs", progress=StopsAfter(cells))
    (partial,) = (folder / "runs").iterdir()
    return partial


def other_weights(folder: Path) -> None:
    families.SPECS["llama-gqa"].build(1).save_pretrained(folder / "tiny")


def other_configuration(folder: Path) -> None:
    config = json.loads((folder / "tiny" / "config.json").read_text())
    config["rms_norm_eps"] = 0.01
    (folder / "tiny" / "config.json").write_text(json.dumps(config))


def other_texts(folder: Path) -> None:
    for file in (folder / "texts").iterdir():
        chance = random.Random(f"other {file.name}")
        file.write_text(" ".join(f"w{chance.randrange(100)}" for _ in range(130)))


def other_tokenizer(folder: Path) -> None:
    file = folder / "tiny" / "tokenizer.json"
    file.write_text(file.read_text().replace('"w100"', '"swapped"').replace('"w101"', '"w100"'))


def other_adapter(folder: Path) -> None:
    noisy(hs.load(str(folder / "tiny"), device="cpu"), 0.2).save(folder / "adapter.safetensors")


def other_needle(folder: Path) -> None:
    write_needle(folder, "w123 w122 w121")


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": other_weights,
    "configuration": other_configuration,
    "texts": other_texts,
    "tokenizer": other_tokenizer,
    "adapter": other_adapter,
    "needles": other_needle,
}
NAMED = {
    ("needle", "texts"): ("haystacks", "'base'", "'learned'"),
    ("adapt", "texts"): ("24 tokens", "'base'", "training texts"),
}
"""What the error names besides the folder, where it is not the kind of the change."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "change"),
    [
        *((probe, change) for probe in PROBES for change in ("weights", "texts", "tokenizer")),
        *((probe, "adapter") for probe in ("measure", "needle", "influence")),
        ("needle", "needles"),
        ("measure", "configuration"),
    ],
)
def test_a_run_resumes_only_from_the_same_inputs(folder: Path, probe: str, change: str) -> None:
    """The error names the change in one line, before any work, and stored cells are kept."""
    cells = 4 if change == "adapter" and probe != "influence" else 1
    partial = interrupted_run(folder, probe, cells)
    stored = {file: file.read_bytes() for file in partial.rglob("*") if file.is_file()}
    shutil.copytree(folder / "tiny", folder / "before")
    CHANGES[change](folder)
    if change == "weights":  # which save_pretrained rewrites too
        shutil.copy(folder / "before" / "config.json", folder / "tiny" / "config.json")
    with pytest.raises(InputChanged) as refusal:
        runner.run_study(study_of(folder, probe), folder / "runs", resume=True)
    message = str(refusal.value)
    assert_names(message, *NAMED.get((probe, change), (change,)), partial)
    assert "\n" not in message
    assert refusal.value.exit_code == 2
    assert stored == {file: file.read_bytes() for file in partial.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("probe", PROBES)
def test_a_run_resumes_after_its_inputs_are_restored(folder: Path, probe: str) -> None:
    uninterrupted = runner.run_study(study_of(folder, probe), folder / "whole")
    interrupted_run(folder, probe)
    shutil.copytree(folder / "tiny", folder / "before")
    other_weights(folder)
    with pytest.raises(InputChanged):
        runner.run_study(study_of(folder, probe), folder / "runs", resume=True)
    shutil.rmtree(folder / "tiny")
    shutil.copytree(folder / "before", folder / "tiny")
    run = runner.run_study(study_of(folder, probe), folder / "runs", resume=True)
    assert contents(run) == contents(uninterrupted)
    assert run.manifest["files"] == uninterrupted.manifest["files"]
    assert run.manifest["inputs"] == uninterrupted.manifest["inputs"]
    assert validate(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("probe", [*PROBES, "detectors"])
def test_a_resumed_run_records_what_only_the_interrupted_process_read(folder: Path, probe: str) -> None:
    """The tokenizer and texts of a model whose cells were all finished before the interruption."""
    study = study_of(folder, probe)
    whole = runner.run_study(study, folder / "whole")
    with pytest.raises(Interrupted):
        runner.run_study(study, folder / "runs", progress=StopsAfter(whole.manifest["timings"]["cells"] - 1))
    run = runner.run_study(study, folder / "runs", resume=True)
    assert contents(run) == contents(whole)
    assert run.manifest["models"] == whole.manifest["models"]
    assert all(model["tokenizer_sha256"] for model in run.manifest["models"])


def test_a_run_resumes_only_in_the_same_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" may stand for another dtype on another machine."""
    interrupted_run(folder, "measure", cells=3)
    for module in (checkpoint, context):
        monkeypatch.setattr(module, "pick_dtype", lambda *_: torch.bfloat16)
    with refuses(InputChanged, "dtype"):
        runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)


def test_models_in_memory_with_equal_weights_can_be_different_inputs(folder: Path) -> None:
    config = families.SPECS["llama-gqa"].build().config
    options: dict[str, Any] = {"text": f"file:{folder}/texts/*.txt", "docs": 1, "lengths": [24], "tables": ["nll"]}

    def loss(model: Any) -> tuple[float, Path]:
        run = hs.measure({"m": model}, out=folder / "runs", resume=True, quiet=True, **options)
        return float(run.nll["nll"].mean()), run.path

    def model_with_theta(theta: float) -> hs.Model:
        other = copy.deepcopy(config)
        other.rope_parameters = {**other.rope_parameters, "rope_theta": theta}
        module = type(families.SPECS["llama-gqa"].build())(other)
        module.load_state_dict(families.SPECS["llama-gqa"].build().state_dict())
        return hs.load(module, tokenizer=hs.load(str(folder / "tiny")).tokenizer)

    model = model_with_theta(1e4)
    learned = noisy(model, 0.1)
    losses = [loss(model), loss(model_with_theta(1e2)), loss(model.with_schedule(learned, "adarope"))]
    with torch.no_grad():
        learned.xi -= 1.5
    losses.append(loss(model.with_schedule(learned, "adarope")))
    assert len({path for _, path in losses}) == len({value for value, _ in losses}) == 4
    assert loss(model_with_theta(1e4)) == losses[0]


def test_equal_weights_in_other_files_are_refused_as_what_they_are(folder: Path) -> None:
    """Files are compared before any is opened; the message says that the weights themselves may be equal."""
    interrupted_run(folder, "measure")
    config = (folder / "tiny" / "config.json").read_text()
    weights = hs.load(str(folder / "tiny")).identity.weights
    model = LlamaForCausalLM.from_pretrained(folder / "tiny")
    (folder / "tiny" / "model.safetensors").unlink()
    model.save_pretrained(folder / "tiny", max_shard_size="20KB")
    (folder / "tiny" / "config.json").write_text(config)
    assert hs.load(str(folder / "tiny")).identity.weights == weights
    with refuses(InputChanged, "weights", "'base'", "files", "equal"):
        runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)


def test_an_input_that_no_finished_cell_used_may_change(folder: Path) -> None:
    """For example, an adapter that is repaired after other models were measured."""
    interrupted_run(folder, "measure", cells=2)
    other_adapter(folder)
    run = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)
    assert contents(run) == contents(runner.run_study(study_of(folder, "measure"), folder / "again"))


def test_resuming_a_study_with_other_options_warns_about_the_unfinished_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = interrupted_run(folder, "measure")
    other = study_of(folder, "measure").model_copy(update={"seed": 1})
    run = runner.run_study(other, folder / "runs", resume=True)
    (warning,) = caplog.messages
    assert_names(warning, partial.stem[1:])
    assert run.path.is_dir()


def test_a_finished_run_is_not_measured_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)
    with caplog.at_level(logging.INFO, "headscope"):
        again = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True, progress=StopsAfter(0))
    assert again.path == first.path
    assert_names(caplog.text, first.path)
    assert list((folder / "runs").iterdir()) == [first.path]


def other_schema(file: Path) -> None:
    """Store the table with a column less, as another version may have done."""
    table = pq.read_table(file)
    pq.write_table(table.select(table.schema.names[:-1]), file)
    manifest = Run.open(file.parent).manifest
    manifest["tables"][file.stem]["sha256"] = sha256(file)
    write_manifest(file.parent, manifest)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "changed": lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]),
    "another schema": other_schema,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "file", "damage"),
    [
        *(("measure", "nll.parquet", damage) for damage in DAMAGES),
        ("measure", "positions.parquet", "deleted"),
        ("adapt", "adapters/step-0001.safetensors", "deleted"),
    ],
)
def test_a_finished_run_with_a_damaged_file_is_measured_again(
    folder: Path, probe: str, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = runner.run_study(study_of(folder, probe), folder / "runs", resume=True)
    expected = contents(first)
    DAMAGES[damage](first.path / file)
    again = runner.run_study(study_of(folder, probe), folder / "runs", resume=True)
    assert_names(caplog.text, first.path, file)
    assert (validate(again), contents(again)) == ([], expected)
    assert runner.run_study(study_of(folder, probe), folder / "runs", resume=True).path == again.path


def test_other_inputs_or_options_start_another_run(folder: Path) -> None:
    first = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)
    other_texts(folder)
    second = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)
    assert isinstance(second, Run)
    assert second.path != first.path
    assert contents(second) != contents(first)
    third = runner.run_study(study_of(folder, "influence"), folder / "runs", resume=True)
    assert len({first.path, second.path, third.path}) == 3


@pytest.mark.parametrize(
    "state", ["{", "[]", '"text"', "{}", '{"global_step": null}', '{"global_step": "x"}', "[" * 9999]
)
def test_a_trainer_state_without_a_step_is_refused_before_any_work(folder: Path, state: str) -> None:
    (folder / "tiny" / "trainer_state.json").write_text(state)
    with refuses(BadInput, folder / "tiny" / "trainer_state.json") as refusal:
        runner.run_study(study_of(folder, "measure"), folder / "runs", progress=StopsAfter(0))
    assert "\n" not in str(refusal.value)
    assert not (folder / "runs").exists()


def test_an_impossible_scheme_is_refused_before_another_model_is_measured(folder: Path) -> None:
    study = content(folder, models={"base": str(folder / "tiny"), "bad": f"{folder}/tiny@adarope:adapter=smollm2-135m"})
    with refuses(BadInput, f"'{folder}/tiny'", "shape"):
        runner.run_study(build_study(study), folder / "runs")
    assert not (folder / "runs").exists()


def test_labels_of_any_length_are_measured(folder: Path) -> None:
    label = "ü" * 400
    study = build_study(
        content(folder, models={label: str(folder / "tiny")}, measure={"lengths": [24], "tables": ["nll"]})
    )
    with pytest.raises(Interrupted):
        runner.run_study(study, folder / "runs", progress=StopsAfter(1))
    run = runner.run_study(study, folder / "runs", resume=True)
    assert run.models == [label]
    assert run.manifest["timings"]["cells_done_now"] == 2
    assert set(run.nll["model"]) == {label}


def test_long_names_of_jobs_get_distinct_files(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, "test", {}) as writer:
        files = {writer._job_file(f"{'x' * length}{end}") for length in (240, 300) for end in "ab"}
    assert len(files) == 4
    assert max(len(file.name) for file in files) <= 255


def test_cells_without_digests_of_their_inputs_are_refused(folder: Path) -> None:
    partial = interrupted_run(folder, "measure")
    (cell,) = (partial / "cells").iterdir()
    line, _, tables = cell.read_bytes().partition(b"\n")
    header = json.dumps(json.loads(line.partition(b" ")[2])["tables"]).encode()  # as earlier versions wrote it
    cell.write_bytes(hashlib.sha256(header).hexdigest().encode() + b" " + header + b"\n" + tables)
    with refuses(BadRun, cell, "version", partial):
        runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "transformers", "headscope"])
def test_another_version_gives_a_warning_and_is_recorded_by_cell(
    library: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = interrupted_run(folder, "measure")
    current = version(library)
    earlier = f"{current.rpartition('.')[0]}.99"
    record_versions(partial, **{library: earlier})
    run = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)
    (warning,) = (message for message in caplog.messages if earlier in message)
    assert_names(warning, library, earlier, current)
    assert run.manifest["versions"][library] == current
    first, second = run.manifest["versions_by_cell"]
    assert (first["versions"][library], second["versions"][library]) == (earlier, current)
    assert (len(first["cells"]), len(second["cells"])) == (1, run.manifest["timings"]["cells"] - 1)
    mark = notebook.findings(run).query("question == 'models.versions'")["text"].item()
    assert_names(mark, f"{library} {earlier}", f"{library} {current}")


@pytest.mark.parametrize(
    ("library", "earlier"), [("torch", "1.13.1"), ("transformers", "4.0.0"), ("headscope", "0.1.9")]
)
def test_a_major_change_of_version_is_refused(library: str, earlier: str, folder: Path) -> None:
    partial = interrupted_run(folder, "measure")
    record_versions(partial, **{library: earlier})
    with refuses(InputChanged, f"{library} {earlier}", f"{library} {version(library)}", partial):
        runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)


def test_one_version_gives_no_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupted_run(folder, "measure")
    run = runner.run_study(study_of(folder, "measure"), folder / "runs", resume=True)
    assert caplog.messages == []
    assert "versions_by_cell" not in run.manifest
