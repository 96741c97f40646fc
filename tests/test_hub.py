"""Revisions of a checkpoint on the hub, from a stand-in that speaks to huggingface_hub as the hub does."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_server import SERVER, Server
from support.hub_server import Hub
from support.tiny_studies import content, save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput
from headscope.models.hub import HubId
from headscope.models.loading import locate
from headscope.positions.model import ModelSpec
from headscope.runs.run import Run, list_runs
from headscope.study.config import read_study

MODEL = "lab/tiny"
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `main`, `step2` and `step10`, and texts."""
    place = tmp_path_factory.mktemp("hub")
    for seed, name in enumerate(("main", "step10", "step2")):
        save_checkpoint(place / name, seed)
    (place / "pickled").mkdir()
    for file in (place / "main").iterdir():
        if file.suffix == ".json":
            (place / "pickled" / file.name).write_bytes(file.read_bytes())
    (place / "pickled" / "pytorch_model.bin").write_bytes(b"no")
    save_texts(place / "texts")
    return place


@pytest.fixture(scope="module")
def hub(place: Path) -> Iterator[Hub]:
    branches = {name: place / name for name in ("main", "step10", "step2", "pickled")}
    with Hub({MODEL: branches, "lab/gated": {}}).serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def server(place: Path, hub: Hub) -> Iterator[Server]:
    """Commands that take this hub for the hub."""
    study = content(place, models={"base": str(place / "main")}, measure={"lengths": [24], "tables": ["nll"]})
    (place / "study.yaml").write_text(json.dumps(study))
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(place / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", SERVER, str(place / "study.yaml"), str(place / "warm")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def measured(server: Server, place: Path, tmp_path: Path) -> Command:
    """Measure with these flags: exit code and what was said."""

    def run(*flags: object) -> tuple[int, str]:
        shared = ("--text", f"file:{place}/texts/*.txt", "--docs", 1, "--length", 24, "--measure", "nll", "--quiet")
        server.begin(tmp_path / "said", "run", *flags, *shared, "--out", tmp_path / "runs")
        return server.end(), (tmp_path / "said").read_text()

    return run


def only_run(folder: Path) -> Run:
    ((_, run),) = list_runs(folder)
    assert isinstance(run, Run)
    return run


def test_a_revision_opens_as_that_revision_and_the_run_names_it(
    measured: Command, hub: Hub, place: Path, tmp_path: Path
) -> None:
    code, said = measured("--model", f"early={MODEL}:step2@yarn:factor=4", "--model", f"last={MODEL}")
    assert code == 0, said
    early, last = only_run(tmp_path / "runs").manifest["models"]
    assert (early["checkpoint"], last["checkpoint"]) == (f"{MODEL}:step2", MODEL)
    assert (early["revision"], last["revision"]) == (hub.commit(MODEL, "step2"), hub.commit(MODEL, "main"))
    assert (early["step"], last["step"]) == (2, None)
    assert early["scheme"] == "yarn:factor=4"
    assert early["weights_sha256"] == hs.load(str(place / "step2"), device="cpu").weights_sha256
    assert early["weights_sha256"] != last["weights_sha256"]
    assert not any(path.endswith(".bin") for path in hub.asked)


def test_a_pattern_becomes_its_branches_in_order_of_step(measured: Command, tmp_path: Path) -> None:
    code, said = measured("--checkpoints", f"{MODEL}:step*@nope")
    assert code == 0, said
    models = only_run(tmp_path / "runs").manifest["models"]
    assert [(each["label"], each["step"]) for each in models] == [("step2", 2), ("step10", 10)]
    assert [each["spec"] for each in models] == [f"{MODEL}:step2@nope", f"{MODEL}:step10@nope"]


@pytest.mark.parametrize(
    ("code", "told", "flags"),
    [
        (3, f"hub model '{MODEL}' has no revision 'step3' (did you mean 'step", ("--model", f"{MODEL}:step3")),
        (3, "no model 'lab/none:step2' on the hub", ("--model", "lab/none:step2")),
        (2, f"no branch or tag of '{MODEL}' matches 'stop*'; it has 4, e.g.", ("--checkpoints", f"{MODEL}:stop*")),
        (3, "hub model 'lab/gated:step2' is gated", ("--model", "lab/gated:step2")),
        (3, "hub model 'lab/gated' is gated", ("--checkpoints", "lab/gated:step*")),
        (3, "no model 'lab/none' on the hub", ("--checkpoints", "lab/none:step*")),
        (2, "has no weights in safetensors, and pickled ones are never opened", ("--model", f"{MODEL}:pickled")),
    ],
)
def test_what_the_hub_does_not_have_is_one_line(
    measured: Command, tmp_path: Path, code: int, told: str, flags: tuple[str, str]
) -> None:
    got, said = measured(*flags)
    assert got == code, said
    assert said.startswith("headscope: ")
    assert said.count("\n") == 1, said
    assert told in said
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize("fails", ["silent", "503"])
def test_what_was_fetched_serves_while_the_hub_is_down(
    measured: Command, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    code, said = measured("--model", f"early={MODEL}:step2", "--name", "before")
    assert code == 0, said
    monkeypatch.setattr(hub, "fails", fails)
    code, said = measured("--model", f"early={MODEL}:step2", "--name", "after")
    assert code == 0, said
    after, before = (run for _, run in list_runs(tmp_path / "runs"))
    assert isinstance(after, Run)
    assert isinstance(before, Run)
    assert after.manifest["models"] == before.manifest["models"]
    for flags, told in (
        (("--model", f"{MODEL}:other"), f"cannot fetch '{MODEL}:other' from the hub"),
        (("--checkpoints", f"{MODEL}:step*"), f"cannot list the branches of '{MODEL}' on the hub"),
    ):
        code, said = measured(*flags)
        assert (code, said.count("\n")) == (3, 1), said
        assert told in said


def test_a_colon_in_a_path_is_a_path(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(place / "main", tmp_path / "lab" / "tiny:step2")
    monkeypatch.chdir(tmp_path)
    assert locate("lab/tiny:step2") == ("lab/tiny:step2", "lab/tiny:step2")
    (tmp_path / "lab" / "tiny").mkdir()
    with pytest.raises(BadInput, match="'lab/tiny' is a folder, which has no revision 'step3'"):
        locate("lab/tiny:step3")


def test_a_revision_in_a_study_file_needs_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("models:\n  early: lab/tiny:step2@yarn:factor=4\nmeasure:\n")
    study = read_study(tmp_path / "study.yaml", {})
    spec = ModelSpec.read(study.models["early"])
    assert (spec.checkpoint, spec.scheme) == ("lab/tiny:step2", "yarn:factor=4")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("org/name", HubId("org/name")),
        ("org/name:step1000", HubId("org/name", "step1000")),
        ("org/name:refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("C:/models/tiny", None),
        (r"C:\models\tiny", None),
        ("./org/name:x", None),
        ("a/b/c:x", None),
        ("name:x", None),
        ("org/name:", None),
        ("org/name:a:b", None),
        ("org/name:*", HubId("org/name", "*")),
    ],
)
def test_what_is_read_as_a_hub_id(text: str, read: HubId | None) -> None:
    assert HubId.parse(text) == read
