"""The tiers of the tests: samples complement each other, differ between commits, and can be repeated."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import sampling

CASES = range(40)
SUITE = """
import pytest

def test_plain(): pass

@pytest.mark.exhaustive
def test_whole(): pass

@pytest.mark.exhaustive(sample=3)
@pytest.mark.parametrize("case", range(10))
def test_cases(case): pass

@pytest.mark.parametrize("case", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_marked_case(case): pass

def test_loop(sampled):
    for case in sampled(range(10), 2):
        print(f"case {case}")
    assert FINE
"""


def run_suite(folder: Path, tier: str, seed: str = "a", fine: bool = True) -> tuple[set[str], str]:
    """The tests and the printed cases of a small suite in this tier, and the output."""
    (folder / "test_suite.py").write_text(SUITE.replace("FINE", str(fine)), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "support.sampling", "-rA", "--tier", tier, "test_suite.py"]
    environment = {"PYTHONPATH": str(Path(__file__).parent), sampling.SEED_VARIABLE: seed}
    output = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    words = [line.removeprefix("PASSED test_suite.py::") for line in output.splitlines()]
    return {word for word in words if re.match(r"test_(?!suite)|case ", word)}, output


@pytest.mark.parametrize("count", [0, 1, 7, 40, 50])
def test_samples_of_the_two_tiers_complement_each_other(count: int) -> None:
    everyday, rest = (sampling.part_of_tier(tier, CASES, count) for tier in ("everyday", "rest"))
    assert len(everyday) == min(count, 40)
    assert sorted(everyday + rest) == [*CASES] == sampling.part_of_tier("all", CASES, count)


def test_the_sample_is_that_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = []
    for seed in ("a", "a", "b"):
        monkeypatch.setenv(sampling.SEED_VARIABLE, seed)
        samples.append(sampling.part_of_tier("everyday", CASES, 5))
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.slow
def test_nothing_is_lost_between_everyday_and_rest(tmp_path: Path) -> None:
    everyday, rest, everything = (run_suite(tmp_path, tier)[0] for tier in sampling.TIERS)
    assert everyday | rest == everything
    assert len(everything) == 1 + 1 + 10 + 2 + 1 + 10
    assert everyday & rest == {"test_loop"}
    assert {"test_plain", "test_marked_case[1]"} <= everyday
    assert {"test_whole", "test_marked_case[0]"} <= rest
    assert len([word for word in everyday if word.startswith("test_cases")]) == 3
    assert len([word for word in everyday if word.startswith("case")]) == 2


@pytest.mark.slow
def test_a_failure_of_a_sample_prints_the_command_that_repeats_it(tmp_path: Path) -> None:
    _, output = run_suite(tmp_path, "rest", seed="b", fine=False)
    assert f"{sampling.SEED_VARIABLE}=b .venv/bin/pytest -n 0 --tier rest test_suite.py::test_loop" in output
