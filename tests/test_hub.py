"""Checkpoints on the hub: revisions, download errors and the local copy, tested against a local hub server."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_server import WARM_UP, Server, serving
from support.hub_server import Hub
from support.refusals import assert_names, refuses
from support.tiny_studies import content, save_checkpoint, save_texts

import headscope as hs
from headscope.base.model_spec import HubId, ModelSpec
from headscope.errors import BadInput
from headscope.models.loading import locate
from headscope.runs.run import Run, list_runs
from headscope.study.config import read_study

MODEL = "lab/tiny"
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints `main`, `step2`, `step10` and `pickled`, and texts."""
    checkpoints = tmp_path_factory.mktemp("hub")
    for seed, name in enumerate(("main", "step10", "step2")):
        save_checkpoint(checkpoints / name, seed)
    (checkpoints / "pickled").mkdir()
    for file in (checkpoints / "main").iterdir():
        if file.suffix == ".json":
            (checkpoints / "pickled" / file.name).write_bytes(file.read_bytes())
    (checkpoints / "pickled" / "pytorch_model.bin").write_bytes(b"no")
    save_texts(checkpoints / "texts")
    return checkpoints


@pytest.fixture(scope="module")
def hub(checkpoints: Path) -> Iterator[Hub]:
    branches = {name: checkpoints / name for name in ("main", "step10", "step2", "pickled")}
    with Hub({MODEL: branches, "lab/gated": {}}).serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def server(checkpoints: Path, hub: Hub) -> Iterator[Server]:
    """A command server that uses the local hub."""
    study = content(
        checkpoints, models={"base": str(checkpoints / "main")}, measure={"lengths": [24], "tables": ["nll"]}
    )
    (checkpoints / "study.yaml").write_text(json.dumps(study))
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(checkpoints / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    with serving(WARM_UP, checkpoints / "study.yaml", checkpoints / "warm", environment=environment) as server:
        yield server


@pytest.fixture
def measure(server: Server, checkpoints: Path, tmp_path: Path) -> Command:
    """Run a measurement with the given flags; returns exit code and stderr."""

    def run(*flags: object) -> tuple[int, str]:
        shared = (
            "--text",
            f"file:{checkpoints}/texts/*.txt",
            "--docs",
            1,
            "--length",
            24,
            "--measure",
            "nll",
            "--quiet",
        )
        server.begin(tmp_path / "stderr", "run", *flags, *shared, "--out", tmp_path / "runs")
        return server.end(), (tmp_path / "stderr").read_text()

    return run


def only_run(folder: Path) -> Run:
    ((_, run),) = list_runs(folder)
    assert isinstance(run, Run)
    return run


@pytest.mark.slow
def test_revision_is_opened_and_stored_in_the_manifest(
    measure: Command, hub: Hub, checkpoints: Path, tmp_path: Path
) -> None:
    code, message = measure("--model", f"early={MODEL}:step2@yarn:factor=4", "--model", f"last={MODEL}")
    assert code == 0, message
    early, last = only_run(tmp_path / "runs").manifest["models"]
    assert (early["checkpoint"], last["checkpoint"]) == (f"{MODEL}:step2", MODEL)
    assert (early["revision"], last["revision"]) == (hub.commit(MODEL, "step2"), hub.commit(MODEL, "main"))
    assert (early["step"], last["step"]) == (2, None)
    assert early["scheme"] == "yarn:factor=4"
    assert early["weights_sha256"] == hs.load(str(checkpoints / "step2"), device="cpu").weights_sha256
    assert early["weights_sha256"] != last["weights_sha256"]
    assert not any(path.endswith(".bin") for path in hub.requested_paths)


@pytest.mark.slow
def test_checkpoint_pattern_expands_to_branches_in_step_order(measure: Command, tmp_path: Path) -> None:
    code, message = measure("--checkpoints", f"{MODEL}:step*@nope")
    assert code == 0, message
    models = only_run(tmp_path / "runs").manifest["models"]
    assert [(model["label"], model["step"]) for model in models] == [("step2", 2), ("step10", 10)]
    assert [model["spec"] for model in models] == [f"{MODEL}:step2@nope", f"{MODEL}:step10@nope"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "named", "flags"),
    [
        (3, (f"'{MODEL}'", "'step3'", "'step2'"), ("--model", f"{MODEL}:step3")),
        (3, ("'lab/none:step2'",), ("--model", "lab/none:step2")),
        (2, (f"'{MODEL}'", "'stop*'", 4, "step2"), ("--checkpoints", f"{MODEL}:stop*")),
        (3, ("'lab/gated:step2'", "hf auth login"), ("--model", "lab/gated:step2")),
        (3, ("'lab/gated'", "hf auth login"), ("--checkpoints", "lab/gated:step*")),
        (3, ("'lab/none'",), ("--checkpoints", "lab/none:step*")),
        (2, (f"'{MODEL}:pickled'", "safetensors"), ("--model", f"{MODEL}:pickled")),
    ],
)
def test_hub_errors_are_one_line(
    measure: Command, tmp_path: Path, code: int, named: tuple[str | int, ...], flags: tuple[str, str]
) -> None:
    exit_code, message = measure(*flags)
    assert exit_code == code, message
    assert message.startswith("headscope: ")
    assert message.count("\n") == 1, message
    assert_names(message, *named)
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["silent", "503"])
def test_downloaded_checkpoint_opens_while_the_hub_is_down(
    measure: Command, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    code, message = measure("--model", f"early={MODEL}:step2", "--name", "before")
    assert code == 0, message
    monkeypatch.setattr(hub, "fails", fails)
    code, message = measure("--model", f"early={MODEL}:step2", "--name", "after")
    assert code == 0, message
    assert_names(message, f"'{MODEL}:step2'")
    after, before = (run for _, run in list_runs(tmp_path / "runs"))
    assert isinstance(after, Run)
    assert isinstance(before, Run)
    assert after.manifest["models"] == before.manifest["models"]
    for flags, named in (
        (("--model", f"{MODEL}:other"), (f"'{MODEL}:other'",)),
        (("--checkpoints", f"{MODEL}:step*"), (f"'{MODEL}'", f"--model {MODEL}:REVISION")),
    ):
        code, message = measure(*flags)
        assert (code, message.count("\n")) == (3, 1), message
        assert_names(message, *named)


def test_existing_path_with_a_colon_is_not_a_hub_id(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoints / "main", tmp_path / "lab" / "tiny:step2")
    monkeypatch.chdir(tmp_path)
    assert locate("lab/tiny:step2") == ("lab/tiny:step2", "lab/tiny:step2")
    (tmp_path / "lab" / "tiny").mkdir()
    with refuses(BadInput, "'lab/tiny'", "'step3'", "':step3'"):
        locate("lab/tiny:step3")


def test_revision_in_a_study_file_needs_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text("models:\n  early: lab/tiny:step2@yarn:factor=4\nmeasure:\n")
    study = read_study(tmp_path / "study.yaml", {})
    spec = ModelSpec.parse(study.models["early"])
    assert (spec.checkpoint, spec.scheme.text) == ("lab/tiny:step2", "yarn:factor=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "hub_id"),
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
def test_hub_id_is_parsed(text: str, hub_id: HubId | None) -> None:
    assert HubId.parse(text) == hub_id
