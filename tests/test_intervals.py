"""Nominal 95 % intervals cover the true value as often as docs/intervals.md says, with exceptions in bold there."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from scipy import stats

from headscope.runs.aggregation import confidence_interval
from probes.needle.analysis import wilson_interval

PAGE = (Path(__file__).parents[1] / "docs" / "intervals.md").read_text(encoding="utf-8")
SIZES = (3, 5, 8, 10, 30, 100)
SAMPLES = 8000
FloatArray = npt.NDArray[np.float64]


def mean_coverage(draw: Callable[[np.random.Generator, tuple[int, int]], FloatArray], mean: float, size: int) -> float:
    low, high = confidence_interval(draw(np.random.default_rng(size), (SAMPLES, size)))
    return float(np.mean((low <= mean) & (mean <= high)))


def paired_differences(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    """Differences of two losses of the same documents, whose common part is skewed; their mean is 0.2."""
    common = rng.lognormal(size=shape)
    return (common + 0.2 + 0.3 * rng.standard_t(3, shape)) - common


def proportion_coverage(share: float, size: int) -> float:
    successes = np.random.default_rng(size).binomial(size, share, SAMPLES)
    low, high = wilson_interval(pd.Series(successes / size), pd.Series(np.full(SAMPLES, size)))
    return float(np.mean((low <= share) & (share <= high)))


COVERAGE: dict[str, Callable[[int], float]] = {
    "mean, normal": lambda size: mean_coverage(lambda rng, shape: rng.normal(size=shape), 0, size),
    "mean, exponential": lambda size: mean_coverage(lambda rng, shape: rng.exponential(size=shape), 1, size),
    "mean, lognormal": lambda size: mean_coverage(lambda rng, shape: rng.lognormal(size=shape), np.exp(0.5), size),
    "logarithm of a lognormal": lambda size: mean_coverage(
        lambda rng, shape: np.log(rng.lognormal(size=shape)), 0, size
    ),
    "mean, Student's t with 3 degrees of freedom": lambda size: mean_coverage(
        lambda rng, shape: rng.standard_t(3, shape), 0, size
    ),
    "paired differences, heavy-tailed": lambda size: mean_coverage(paired_differences, 0.2, size),
    "proportion 0.1": lambda size: proportion_coverage(0.1, size),
    "proportion 0.5": lambda size: proportion_coverage(0.5, size),
    "proportion 0.9": lambda size: proportion_coverage(0.9, size),
}


def row(name: str) -> str:
    """A row of the table in the docs; coverage outside 93 to 97 % is bold."""
    values = (f"{COVERAGE[name](size):.3f}" for size in SIZES)
    return f"| {name} | " + " | ".join(v if 0.93 <= float(v) <= 0.97 else f"**{v}**" for v in values) + " |"


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERAGE)
def test_the_docs_have_the_measured_coverage(name: str) -> None:
    stored = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    numbers = [[float(value) for value in re.findall(r"\d\.\d{3}", line)] for line in (stored, row(name))]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.002)
    assert stored.count("**") == row(name).count("**")


def test_interval_of_3_to_29_documents_is_students_t() -> None:
    for documents in (3, 4, 10, 29):
        values = np.random.default_rng(2).normal(size=(5, documents))
        for values_of_unit, *limits in zip(values, *confidence_interval(values), strict=True):
            expected = stats.t.interval(0.95, documents - 1, values_of_unit.mean(), stats.sem(values_of_unit))
            assert limits == pytest.approx(expected)


@pytest.mark.parametrize("documents", [30, 60])
def test_interval_of_30_or_more_documents_is_bca(documents: int) -> None:
    values = np.random.default_rng(1).lognormal(size=(3, documents))
    for values_of_unit, *limits in zip(values, *confidence_interval(values), strict=True):
        expected = stats.bootstrap((values_of_unit,), np.mean, n_resamples=20_000, method="BCa", random_state=3)
        width = np.ptp(expected.confidence_interval)
        assert limits == pytest.approx(expected.confidence_interval, abs=0.07 * width)


@pytest.mark.parametrize("documents", [1, 2])
def test_one_or_two_documents_give_no_interval(documents: int) -> None:
    assert np.isnan(confidence_interval(np.ones((3, documents)))).all()


def test_equal_values_have_an_interval_of_width_zero() -> None:
    assert confidence_interval(np.ones((2, 40))).tolist() == [[1, 1], [1, 1]]


if __name__ == "__main__":  # the rows of the table in docs/intervals.md
    print(*map(row, COVERAGE), sep="\n")
