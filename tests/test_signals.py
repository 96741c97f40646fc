"""Ctrl-C and SIGTERM at random moments: exit code 4 (0 where the run was finished), one line, the same bytes after."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from support.command_server import WARM_UP, Server, serving
from support.refusals import assert_names, refuses
from support.tiny_studies import content, contents, save_checkpoint, save_texts

from headscope.errors import Interrupted
from headscope.runs import writer
from headscope.runs.run import Run, list_runs
from headscope.study import runner
from headscope.study.config import build_study

CELLS = 3
STEP = 0.002
"""Seconds between two looks at a child."""
HANGS = 600
"""Seconds after which a child counts as hung, however slow the machine."""


@pytest.fixture(scope="module")
def server(plan: Path) -> Iterator[Server]:
    with serving(WARM_UP, plan, plan.parent / "warm") as server:
        yield server


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study file of three cells."""
    folder_of_plan = tmp_path_factory.mktemp("signals")
    save_checkpoint(folder_of_plan / "tiny")
    save_texts(folder_of_plan / "texts")
    study = content(
        folder_of_plan, models={"base": str(folder_of_plan / "tiny")}, measure={"lengths": [24], "tables": ["nll"]}
    )
    (folder_of_plan / "study.yaml").write_text(json.dumps(study))
    return folder_of_plan / "study.yaml"


@pytest.fixture(scope="module")
def uninterrupted_run(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The study, uninterrupted."""
    return runner.run_study(build_study(json.loads(plan.read_text())), tmp_path_factory.mktemp("whole"))


def catches_sigterm(process: int) -> bool:
    """Whether `main` has begun: the process catches SIGTERM. It also counts as such once it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True
    caught = int(status.partition("SigCgt:")[2].split()[0], 16) if "SigCgt:" in status else -1
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def wait_until(reached: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANGS
    while not reached():
        assert time.monotonic() < limit
        time.sleep(STEP)


def has_stored_cells(out: Path, process: int) -> bool:
    """Whether all cells are stored, so that the commit is near, or the process has ended."""
    try:
        counts = [len(os.listdir(cells)) for cells in out.glob(".*.partial/cells")]
    except FileNotFoundError:  # it was committed just now
        return True
    return CELLS in counts or not Path(f"/proc/{process}").exists()


def send_signal(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(process, number)


def assert_ended_well(code: int, output: str, out: Path) -> None:
    assert code in (0, 4), output
    assert "Traceback" not in output
    assert "Exception ignored" not in output
    if code == 4:
        last = output.strip().splitlines()[-1]
        assert last.removeprefix("\x1b[?25h").startswith("headscope: "), output
    else:
        assert [run for _, run in list_runs(out) if isinstance(run, Run)], output


def assert_resumes(server: Server, plan: Path, out: Path, uninterrupted_run: Run) -> None:
    server.begin(out.with_suffix(".resumed"), "run", plan, "--out", out, "--resume", "--quiet")
    assert server.end() == 0, out.with_suffix(".resumed").read_text()
    ((folder, run),) = list_runs(out)
    assert isinstance(run, Run)
    assert contents(run) == contents(uninterrupted_run)
    assert list(out.iterdir()) == [folder]


def test_a_second_signal_adds_no_second_line(tmp_path: Path) -> None:
    """Ctrl-C twice: the first ends the work with its line, and the second must not repeat it."""
    code = (
        "import signal, sys\n"
        "from headscope.base import signals\n"
        "from headscope.cli import app\n"
        "def work(**_): signal.raise_signal(signal.SIGINT)\n"
        "def end(code): signal.raise_signal(signal.SIGINT)\n"
        "app.app, sys.exit = work, end\n"
        "app.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("headscope: ")) == (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGINT, 2),
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGINT, 15, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, 9, marks=pytest.mark.exhaustive),
    ],
)
def test_run_interrupted_at_any_moment_resumes_to_the_same_bytes(
    server: Server, plan: Path, uninterrupted_run: Run, tmp_path: Path, number: int, times: int
) -> None:
    chance, codes = random.Random(number), []
    server.begin(tmp_path / "first", "run", plan, "--out", tmp_path / "first-out", "--quiet")
    began = time.monotonic()
    assert server.end() == 0
    lasts = time.monotonic() - began
    span = lasts
    for attempt in count():
        if attempt >= times and codes.count(4) > times / 3:  # more attempts where the machine became faster meanwhile
            break
        out, output = tmp_path / f"{attempt}", tmp_path / f"{attempt}.txt"
        process = server.begin(output, "run", plan, "--out", out, "--quiet")
        wait_until(partial(catches_sigterm, process))
        is_near_commit = attempt % 3 == 0 and attempt < times
        if not is_near_commit:
            time.sleep(chance.uniform(0, span))
        else:
            wait_until(partial(has_stored_cells, out, process))
            time.sleep(chance.uniform(0, lasts / 4))
        send_signal(process, number)
        codes.append(server.end())
        if not is_near_commit:  # most signals come while there is work, whatever else the machine does meanwhile
            span *= 1.1 if codes[-1] == 4 else 0.7
        assert_ended_well(codes[-1], output.read_text(), out)
        assert_resumes(server, plan, out, uninterrupted_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times"),
    [
        (signal.SIGINT, 1),
        pytest.param(signal.SIGINT, 3, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_process_interrupted_at_any_moment_ends_without_traceback_and_resumes(
    server: Server, plan: Path, uninterrupted_run: Run, tmp_path: Path, number: int, times: int
) -> None:
    """From `main` through the import of torch, which takes most of the time, to the end of the interpreter."""
    chance, lasts = random.Random(number), 3.0
    for attempt in range(times):
        out, output = tmp_path / f"{attempt}", tmp_path / f"{attempt}.txt"
        command = [sys.executable, "-m", "headscope", "run", str(plan), "--out", str(out), "--quiet"]
        with output.open("w") as file:
            child = subprocess.Popen(command, stdout=file, stderr=file)
        wait_until(partial(catches_sigterm, child.pid))
        began = time.monotonic()
        if attempt:
            time.sleep(chance.uniform(0, lasts))
        else:  # the first comes near the end, wherever that is on this machine
            wait_until(lambda: has_stored_cells(out, child.pid) or child.poll() is not None)  # noqa: B023 (called at once)
            lasts = time.monotonic() - began
        child.send_signal(number)
        assert_ended_well(child.wait(HANGS), output.read_text(), out)
        assert_resumes(server, plan, out, uninterrupted_run)


def test_signal_handlers_are_installed_before_heavy_imports() -> None:
    script = "import sys, headscope.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "headscope.base.signals" in loaded
    assert not {"typer", "rich", "headscope.cli.app", "headscope.base.plugins", "importlib.metadata"} & set(loaded)


def test_ctrl_c_during_a_commit_waits_for_its_end(
    plan: Path, uninterrupted_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard = writer._discard

    def pressed(partial: Path) -> None:
        signal.raise_signal(signal.SIGINT)
        discard(partial)

    monkeypatch.setattr(writer, "_discard", pressed)
    with refuses(Interrupted) as stop:
        runner.run_study(build_study(json.loads(plan.read_text())), tmp_path)
    assert "\n" not in str(stop.value)
    ((folder, run),) = list_runs(tmp_path)
    assert isinstance(run, Run)
    assert_names(str(stop.value), folder)
    assert "--resume" not in str(stop.value)
    assert contents(run) == contents(uninterrupted_run)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.exhaustive(sample=3)
@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "validate", "report"])
@pytest.mark.parametrize(("redirection", "code"), [("| true", 1), (">&-", 0), ("> /dev/full", 2)])
def test_an_output_that_cannot_be_written_gives_no_traceback(
    command: str, redirection: str, code: int, uninterrupted_run: Run, tmp_path: Path
) -> None:
    target = uninterrupted_run.path.parent if command == "ls" else uninterrupted_run.path
    out = f"--out {tmp_path}/r.html" if command == "report" else ""
    line = f"{sys.executable} -m headscope {command} {target} {out} {redirection}; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == (code == 2)
