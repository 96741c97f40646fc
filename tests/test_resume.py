"""Going on with a run: only from what it was made from, told in one line; a finished one is not measured again."""

import copy
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from adapters import noisy
from test_study import StopsAfter, content, contents, save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput, Changed, Interrupted
from headscope.models import checkpoint
from headscope.runs.run import Run
from headscope.runs.validate import validate
from headscope.runs.writer import RunWriter
from headscope.study import context, runner
from headscope.study.config import build_study

SECTIONS: dict[str, dict[str, Any]] = {
    "measure": {"measure": {"lengths": [24], "tables": ["nll"]}},
    "needle": {"needle": {"lengths": [90], "depths": 1, "needles": 1, "seeds": 1, "template": "plain"}},
    "influence": {
        "influence": {
            "lengths": [24],
            "method": "exact",
            "components": ["joint"],
            "curve": False,
            "models": ["learned"],
        }
    },
    "adapt": {
        "adapt": {
            "factor": 2,
            "phases": [{"length": 16, "steps": 2}],
            "keep": 1,
            "warmup": 1,
            "validation_length": 24,
        }
    },
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint `tiny`, four `texts` of 130 words, an adapter and a needle."""
    save_checkpoint(tmp_path / "tiny")
    save_texts(tmp_path / "texts", 130)
    noisy(hs.load(str(tmp_path / "tiny"), device="cpu")).save(tmp_path / "adapter.safetensors")
    write_needle(tmp_path, "w120 w121 w122")
    return tmp_path


def write_needle(place: Path, fact: str) -> None:
    needle = {"name": "one", "question": "w1", "opening": "w2 w3", "fact": fact}
    (place / "needle.jsonl").write_text(json.dumps(needle))


def planned(place: Path, section: str) -> Any:
    tiny = str(place / "tiny")
    models = {"base": tiny, "learned": f"{tiny}@adarope:adapter={place}/adapter.safetensors,weights=any"}
    options = json.loads(json.dumps(SECTIONS[section]))
    if section == "needle":
        options["needle"]["file"] = str(place / "needle.jsonl")
    if section == "adapt":
        models = {"base": tiny}
        options["adapt"]["train"] = [f"file:{place}/texts/*.txt"]
    return build_study(content(place, models=models, measure=None) | options)


def cut(place: Path, section: str, cells: int = 1) -> Path:
    """The study, stopped after some cells; returns the partial directory."""
    with pytest.raises(Interrupted):
        runner.run_study(planned(place, section), place / "runs", progress=StopsAfter(cells))
    (partial,) = (place / "runs").iterdir()
    return partial


def other_weights(place: Path) -> None:
    families.SPECS["llama-gqa"].build(1).save_pretrained(place / "tiny")


def other_configuration(place: Path) -> None:
    config = json.loads((place / "tiny" / "config.json").read_text())
    config["rms_norm_eps"] = 0.01
    (place / "tiny" / "config.json").write_text(json.dumps(config))


def other_texts(place: Path) -> None:
    for file in (place / "texts").iterdir():
        chance = random.Random(f"other {file.name}")
        file.write_text(" ".join(f"w{chance.randrange(100)}" for _ in range(130)))


def other_tokenizer(place: Path) -> None:
    file = place / "tiny" / "tokenizer.json"
    file.write_text(file.read_text().replace('"w100"', '"swapped"').replace('"w101"', '"w100"'))


def other_adapter(place: Path) -> None:
    noisy(hs.load(str(place / "tiny"), device="cpu"), 0.2).save(place / "adapter.safetensors")


def other_needle(place: Path) -> None:
    write_needle(place, "w123 w122 w121")


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": other_weights,
    "configuration": other_configuration,
    "texts": other_texts,
    "tokenizer": other_tokenizer,
    "adapter": other_adapter,
    "needles": other_needle,
}
SAID = {
    ("needle", "texts"): "the haystacks of 'base' changed",
    ("adapt", "texts"): "the texts of 24 tokens of 'base' and the training texts changed",
    ("needle", "needles"): "the needles changed",
}


@pytest.mark.parametrize(
    ("section", "change"),
    [
        *((section, change) for section in SECTIONS for change in ("weights", "texts", "tokenizer")),
        *((section, "adapter") for section in ("measure", "needle", "influence")),
        ("needle", "needles"),
        ("measure", "configuration"),
    ],
)
def test_a_run_goes_on_only_with_what_it_was_made_from(place: Path, section: str, change: str) -> None:
    """In one line that says what changed, before anything is measured, and nothing is lost by it."""
    cells = 4 if change == "adapter" and section != "influence" else 1
    partial = cut(place, section, cells)
    kept = {file: file.read_bytes() for file in partial.rglob("*") if file.is_file()}
    shutil.copytree(place / "tiny", place / "before")
    CHANGES[change](place)
    if change == "weights":  # the others of the folder stay as they were
        shutil.copy(place / "before" / "config.json", place / "tiny" / "config.json")
    with pytest.raises(Changed) as refusal:
        runner.run_study(planned(place, section), place / "runs", resume=True)
    said = str(refusal.value)
    assert SAID.get((section, change), f"the {change} of") in said
    assert str(partial) in said
    assert "\n" not in said
    assert refusal.value.exit_code == 2
    assert kept == {file: file.read_bytes() for file in partial.rglob("*") if file.is_file()}


@pytest.mark.parametrize("section", SECTIONS)
def test_what_was_put_back_goes_on_to_the_same_bytes(place: Path, section: str) -> None:
    whole = runner.run_study(planned(place, section), place / "whole")
    cut(place, section)
    shutil.copytree(place / "tiny", place / "before")
    other_weights(place)
    with pytest.raises(Changed):
        runner.run_study(planned(place, section), place / "runs", resume=True)
    shutil.rmtree(place / "tiny")
    shutil.copytree(place / "before", place / "tiny")
    run = runner.run_study(planned(place, section), place / "runs", resume=True)
    assert contents(run) == contents(whole)
    assert run.manifest["files"] == whole.manifest["files"]
    assert run.manifest["inputs"] == whole.manifest["inputs"]
    assert validate(run) == []


def test_a_run_goes_on_only_in_the_dtype_that_it_began_in(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which "auto" is on this machine may be another on the next."""
    cut(place, "measure", cells=3)
    for module in (checkpoint, context):
        monkeypatch.setattr(module, "pick_dtype", lambda *_: torch.bfloat16)
    with pytest.raises(Changed, match="cannot go on with this run: the dtype changed"):
        runner.run_study(planned(place, "measure"), place / "runs", resume=True)


def test_a_model_in_memory_is_known_by_more_than_its_weights(place: Path) -> None:
    config = families.SPECS["llama-gqa"].build().config
    options: dict[str, Any] = {"text": f"file:{place}/texts/*.txt", "docs": 1, "lengths": [24], "tables": ["nll"]}

    def loss(model: Any) -> tuple[float, Path]:
        run = hs.measure({"m": model}, out=place / "runs", resume=True, quiet=True, **options)
        return float(run.nll["nll"].mean()), run.path

    def built(theta: float) -> hs.Model:
        other = copy.deepcopy(config)
        other.rope_parameters = {**other.rope_parameters, "rope_theta": theta}
        module = type(families.SPECS["llama-gqa"].build())(other)
        module.load_state_dict(families.SPECS["llama-gqa"].build().state_dict())
        return hs.load(module, tokenizer=hs.load(str(place / "tiny")).tokenizer)

    model = built(1e4)
    learned = noisy(model, 0.1)
    found = [loss(model), loss(built(1e2)), loss(model.under(learned, "adarope"))]
    with torch.no_grad():
        learned.xi -= 1.5
    found.append(loss(model.under(learned, "adarope")))
    assert len({path for _, path in found}) == len({told for told, _ in found}) == 4
    assert loss(built(1e4)) == found[0]


def test_what_no_finished_cell_used_may_change(place: Path) -> None:
    """A model that is broken is mended after the ones before it were measured."""
    cut(place, "measure", cells=2)
    other_adapter(place)
    run = runner.run_study(planned(place, "measure"), place / "runs", resume=True)
    assert contents(run) == contents(runner.run_study(planned(place, "measure"), place / "again"))


def test_a_study_that_goes_on_with_nothing_says_what_else_is_unfinished(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial = cut(place, "measure")
    other = planned(place, "measure").model_copy(update={"seed": 1})
    run = runner.run_study(other, place / "runs", resume=True)
    told = f"{partial.stem[1:]} is unfinished, but of other options than these: this run starts anew"
    assert [record.message for record in caplog.records] == [told]
    assert run.path.is_dir()


def test_a_finished_run_is_not_measured_again(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = runner.run_study(planned(place, "measure"), place / "runs", resume=True)
    with caplog.at_level(logging.INFO, "headscope"):
        again = runner.run_study(planned(place, "measure"), place / "runs", resume=True, progress=StopsAfter(0))
    assert again.path == first.path
    assert f"finished already, and nothing was measured again: {first.path}" in caplog.text
    assert list((place / "runs").iterdir()) == [first.path]


def test_a_finished_run_of_other_inputs_or_options_is_another(place: Path) -> None:
    first = runner.run_study(planned(place, "measure"), place / "runs", resume=True)
    other_texts(place)
    second = runner.run_study(planned(place, "measure"), place / "runs", resume=True)
    assert isinstance(second, Run)
    assert second.path != first.path
    assert contents(second) != contents(first)
    third = runner.run_study(planned(place, "influence"), place / "runs", resume=True)
    assert len({first.path, second.path, third.path}) == 3


@pytest.mark.parametrize(
    "state", ["{", "[]", '"text"', "{}", '{"global_step": null}', '{"global_step": "x"}', "[" * 9999]
)
def test_a_trainer_state_without_a_step_is_told_before_anything_is_measured(place: Path, state: str) -> None:
    (place / "tiny" / "trainer_state.json").write_text(state)
    with pytest.raises(BadInput, match=r"cannot read a training step in '.*trainer_state\.json'") as refusal:
        runner.run_study(planned(place, "measure"), place / "runs", progress=StopsAfter(0))
    assert "\n" not in str(refusal.value)
    assert not (place / "runs").exists()


def test_a_scheme_that_does_not_fit_is_told_before_another_is_measured(place: Path) -> None:
    study = content(place, models={"base": str(place / "tiny"), "bad": f"{place}/tiny@adarope:adapter=smollm2-135m"})
    with pytest.raises(BadInput, match="does not fit"):
        runner.run_study(build_study(study), place / "runs")
    assert list((place / "runs").iterdir()) == []


def test_labels_of_any_length_are_measured(place: Path) -> None:
    label = "ü" * 400
    study = build_study(
        content(place, models={label: str(place / "tiny")}, measure={"lengths": [24], "tables": ["nll"]})
    )
    with pytest.raises(Interrupted):
        runner.run_study(study, place / "runs", progress=StopsAfter(1))
    run = runner.run_study(study, place / "runs", resume=True)
    assert run.models == [label]
    assert run.manifest["timings"]["cells_done_now"] == 2
    assert set(run.nll["model"]) == {label}


def test_long_names_of_cells_are_told_apart(tmp_path: Path) -> None:
    with RunWriter.open(tmp_path, "test", {}) as writer:
        folders = {writer._cell(f"{'x' * length}{end}") for length in (240, 300) for end in "ab"}
    assert len(folders) == 4
    assert max(len(folder.name) for folder in folders) <= 255
