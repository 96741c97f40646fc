"""Tiers of the tests: `make test` samples what is exhaustive, `make test-all` runs everything.

A test marked `exhaustive` belongs to the tier `rest`; with `exhaustive(sample=4)`, `everyday` runs 4 of its cases and
`rest` the others. A test that calls the fixture `sampled` runs in both tiers, on parts that complement each other. All
other tests belong to `everyday`. The hash of the commit chooses the samples, so that they differ between commits.
"""

import os
import random
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
TIERS = {
    "everyday": "every behaviour; of exhaustive tests a sample",
    "rest": "what `everyday` leaves out",
    "all": "everything",
}
SEED_VARIABLE = "HEADSCOPE_TEST_SAMPLE"
"""Environment variable with the text that chooses the samples."""
ROOT = Path(__file__).parents[2]


def commit() -> str:
    """The hash of the commit that is tested, "none" outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def part_of_tier(tier: str, cases: Sequence[T], count: int) -> list[T]:
    """The cases that a tier runs, in order: `count` of them, the others, or all."""
    choice = random.Random(os.environ[SEED_VARIABLE]).sample(range(len(cases)), min(count, len(cases)))
    is_in_tier = {"everyday": choice.__contains__, "rest": lambda index: index not in choice, "all": lambda _: True}
    return [case for index, case in enumerate(cases) if is_in_tier[tier](index)]


def pytest_addoption(parser: pytest.Parser) -> None:
    described = "; ".join(f"{name}: {meaning}" for name, meaning in TIERS.items())
    parser.addoption("--tier", choices=TIERS, default="everyday", help=f"Tests to run. {described}.")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SEED_VARIABLE, commit())  # worker processes inherit it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("tier")
    tests: dict[tuple[str, int | None], list[pytest.Item]] = defaultdict(list)  # their cases
    for item in items:
        mark = item.get_closest_marker("exhaustive")
        tests[item.nodeid.partition("[")[0], mark and mark.kwargs.get("sample", 0)].append(item)
    selected = {item for (_, sample), cases in tests.items() for item in _select(tier, cases, sample)}
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


def _select(tier: str, cases: list[pytest.Item], sample: int | None) -> list[pytest.Item]:
    """The cases of one test that the tier runs; `sample` is None for a test that is not exhaustive."""
    if sample is not None:
        return part_of_tier(tier, cases, sample)
    return [item for item in cases if tier != "rest" or "sampled" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Print the command that repeats a failure on the same sample."""
    report = yield
    if report.failed and ("sampled" in getattr(item, "fixturenames", ()) or item.get_closest_marker("exhaustive")):
        sample = f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]}"
        command = f"{sample} .venv/bin/pytest -n 0 --tier {item.config.getoption('tier')} {shlex.quote(item.nodeid)}"
        report.sections.append(("Command that repeats this failure", command))
    return report


@pytest.fixture(scope="session")
def tier(request: pytest.FixtureRequest) -> str:
    """The tier that runs."""
    return str(request.config.getoption("tier"))


@pytest.fixture(scope="session")
def sampled(tier: str) -> Callable[..., list[Any]]:
    """`sampled(cases, count)`: the cases that the tier runs."""
    return partial(part_of_tier, tier)
