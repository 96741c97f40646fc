"""Nominal 95 % intervals cover the true value as often as docs/intervals.md says, with exceptions in bold there.

`python -m tests.test_intervals` prints the rows of its tables.
"""

import re
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from scipy import stats
from scipy.special import ndtr, ndtri

from headscope.results.effects.ranking import select_units
from headscope.runs import aggregation
from headscope.runs.aggregation import confidence_interval, statistic_interval, wilson_interval
from probes.scaling.results import mean_with_interval as ratio_with_interval

PAGE = (Path(__file__).parents[1] / "docs" / "intervals.md").read_text(encoding="utf-8")
SIZES = (3, 5, 8, 10, 20, 30, 50, 100, 200)
SAMPLES = 8000
BOOTSTRAP_SIZES = (5, 10, 30, 100)
BOOTSTRAP_SAMPLES, BOOTSTRAP_DRAWS = 2000, 1000
FloatArray = npt.NDArray[np.float64]
Interval = Callable[[FloatArray], FloatArray]
Draw = Callable[[np.random.Generator, tuple[int, int]], FloatArray]


def mean_coverage(
    draw: Draw, mean: float, size: int, samples: int = SAMPLES, interval: Interval = confidence_interval
) -> float:
    low, high = interval(draw(np.random.default_rng(size), (samples, size)))
    return float(np.mean((low <= mean) & (mean <= high)))


def bca_interval(values: FloatArray) -> FloatArray:
    """The bias-corrected and accelerated bootstrap interval [2, units] of the mean of each row (Efron 1987)."""
    documents = values.shape[1]
    weights = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), BOOTSTRAP_DRAWS)
    mean, means = values.mean(axis=1, keepdims=True), np.sort(values @ weights.T / documents, axis=1)
    centred = values - mean
    acceleration = (centred**3).sum(axis=1) / (6 * (centred**2).sum(axis=1) ** 1.5)
    bias = ndtri((means < mean).mean(axis=1))
    shifted = bias + ndtri([[0.025], [0.975]])
    places = ndtr(bias + shifted / (1 - acceleration * shifted)) * (BOOTSTRAP_DRAWS - 1)
    return np.asarray(np.take_along_axis(means, np.rint(places).astype(int).T, axis=1).T)


def paired_differences(rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
    """Differences of two losses of the same documents, whose common part is skewed; their mean is 0.2."""
    common = rng.lognormal(size=shape)
    return (common + 0.2 + 0.3 * rng.standard_t(3, shape)) - common


def proportion_coverage(share: float, size: int) -> float:
    successes = np.random.default_rng(size).binomial(size, share, SAMPLES)
    low, high = wilson_interval(pd.Series(successes / size), pd.Series(np.full(SAMPLES, size)))
    return float(np.mean((low <= share) & (share <= high)))


MEANS: Mapping[str, tuple[Draw, float]] = {
    "mean, normal": (lambda rng, shape: rng.normal(size=shape), 0),
    "mean, uniform": (lambda rng, shape: rng.uniform(size=shape), 0.5),
    "mean, exponential": (lambda rng, shape: rng.exponential(size=shape), 1),
    "mean, lognormal": (lambda rng, shape: rng.lognormal(size=shape), float(np.exp(0.5))),
    "logarithm of a lognormal": (lambda rng, shape: np.log(rng.lognormal(size=shape)), 0),
    "mean, Student's t with 3 degrees of freedom": (lambda rng, shape: rng.standard_t(3, shape), 0),
    "paired differences, heavy-tailed": (paired_differences, 0.2),
}
"""The distribution and its mean, by the name of its row."""
COVERAGE: Mapping[str, Callable[[int], float]] = {
    name: lambda size, draw=draw, mean=mean: mean_coverage(draw, mean, size)  # type: ignore[misc]
    for name, (draw, mean) in MEANS.items()
} | {
    f"proportion {share}": lambda size, share=share: proportion_coverage(share, size)  # type: ignore[misc]
    for share in (0.1, 0.5, 0.9)
}


CHOSEN_SIZES = (3, 5, 8, 16, 30)
CHOSEN_UNITS, CHOSEN_TABLES = 270, 400
SPREADS = {"no unit has an effect": 0.0, "effects vary with a standard deviation of 0.3": 0.3}
SELECTED_UNITS = {"all measured": (CHOSEN_UNITS, 0), "10 selected by estimates and 10 random ones measured": (10, 10)}
CHOSEN = {f"{effects}, {units}": (effects, units) for effects in SPREADS for units in SELECTED_UNITS}
"""Effects of the units, and which of them were measured, by the name of the row."""


def chosen_coverage(name: str, size: int) -> tuple[float, float]:
    """How often the interval of the largest of 270 units covers its true effect: without and with the correction.

    Estimates are the effects that would be measured in the same samples: the worst case for a selection by them.
    """
    rng, covered = np.random.default_rng(size), np.zeros(2)
    spread, (top, drawn) = SPREADS[CHOSEN[name][0]], SELECTED_UNITS[CHOSEN[name][1]]
    for _ in range(CHOSEN_TABLES):
        true_effects = rng.normal(0, spread, CHOSEN_UNITS)
        values = true_effects[:, None] + rng.normal(size=(CHOSEN_UNITS, size))
        measured = select_units(np.square(values).mean(axis=1), top, drawn, [0])
        largest = measured[values[measured].mean(axis=1).argmax()]
        for number, choices in enumerate((1, len(measured))):
            low, high = confidence_interval(values[[largest]], choices)[:, 0]
            covered[number] += low <= true_effects[largest] <= high
    return float(covered[0] / CHOSEN_TABLES), float(covered[1] / CHOSEN_TABLES)


def chosen_row(name: str) -> str:
    """A row of the third table in the docs."""
    texts = ("{:.2f}, {:.2f}".format(*chosen_coverage(name, size)) for size in CHOSEN_SIZES)
    return f"| {name} | " + " | ".join(texts) + " |"


def row(name: str) -> str:
    """A row of the table in the docs; coverage outside 93 to 97 % is bold."""
    values = (f"{COVERAGE[name](size):.3f}" for size in SIZES)
    return f"| {name} | " + " | ".join(v if 0.93 <= float(v) <= 0.97 else f"**{v}**" for v in values) + " |"


def comparison(name: str) -> list[tuple[float, float]]:
    """Coverage of Student's t and of the bootstrap in the same samples of each size."""
    sample = (*MEANS[name],)
    return [
        (mean_coverage(*sample, size, BOOTSTRAP_SAMPLES), mean_coverage(*sample, size, BOOTSTRAP_SAMPLES, bca_interval))
        for size in BOOTSTRAP_SIZES
    ]


def comparison_row(name: str) -> str:
    """A row of the second table in the docs."""
    return f"| {name} | " + " | ".join(f"{t:.3f}, {bootstrap:.3f}" for t, bootstrap in comparison(name)) + " |"


def stored_row(name: str, table: int) -> str:
    """The row of this name in the first (0) or second (1) table of the page."""
    return [line for line in PAGE.splitlines() if line.startswith(f"| {name} |")][table]


@pytest.mark.slow
@pytest.mark.parametrize("name", COVERAGE)
def test_the_docs_have_the_measured_coverage(name: str) -> None:
    stored, measured = stored_row(name, 0), row(name)
    numbers = [[float(value) for value in re.findall(r"\d\.\d{3}", line)] for line in (stored, measured)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.002)
    assert stored.count("**") == measured.count("**")


@pytest.mark.slow
@pytest.mark.parametrize("name", MEANS)
def test_students_t_covers_at_least_as_often_as_the_bootstrap(name: str) -> None:
    """Where the bootstrap covers more often, both miss 95 % and differ by less than one percentage point."""
    measured = comparison(name)
    assert all(t >= bootstrap - 0.01 for t, bootstrap in measured)
    assert all(t >= bootstrap or t < 0.93 for t, bootstrap in measured)
    stored = [float(value) for value in re.findall(r"\d\.\d{3}", stored_row(name, 1))]
    assert stored == pytest.approx(np.ravel(measured), abs=0.002)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_interval_of_the_largest_of_many_covers_with_the_correction_only(name: str) -> None:
    stored = [float(value) for value in re.findall(r" (\d\.\d\d)\b", stored_row(name, 0))]
    assert stored[:2] == pytest.approx(chosen_coverage(name, CHOSEN_SIZES[0]), abs=0.01)
    assert all(corrected >= 0.95 > plain for plain, corrected in zip(stored[::2], stored[1::2], strict=True))


def test_every_interval_of_a_mean_is_students_t() -> None:
    for documents in (3, 4, 10, 29, 30, 31, 200):
        values = np.random.default_rng(2).lognormal(size=(5, documents))
        for values_of_unit, *limits in zip(values, *confidence_interval(values), strict=True):
            expected = stats.t.interval(0.95, documents - 1, values_of_unit.mean(), stats.sem(values_of_unit))
            assert limits == pytest.approx(expected)


def test_ratios_are_averaged_as_logarithms() -> None:
    ratios = pd.Series(np.random.default_rng(3).lognormal(size=12))
    mean, low, high = ratio_with_interval(ratios)
    reciprocal = ratio_with_interval(1 / ratios)
    assert (mean, low, high) == pytest.approx((1 / reciprocal[0], 1 / reciprocal[2], 1 / reciprocal[1]))


@pytest.mark.parametrize("documents", [1, 2])
def test_one_or_two_documents_give_no_interval(documents: int) -> None:
    assert np.isnan(confidence_interval(np.ones((3, documents)))).all()


def test_equal_values_have_an_interval_of_width_zero() -> None:
    assert confidence_interval(np.ones((2, 40))).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("statistic", [lambda a, b: np.median(a, -1) - b.mean(-1), lambda a, b: a.std(-1) / b.std(-1)])
def test_a_bootstrap_in_blocks_gives_the_same_interval(monkeypatch: pytest.MonkeyPatch, statistic: Any) -> None:
    rng = np.random.default_rng(1)
    samples = rng.normal(size=301), rng.normal(2, 1, size=98)
    draws = np.random.default_rng(0)
    resampled = [s[draws.integers(len(s), size=(aggregation.BOOTSTRAP_DRAWS, len(s)))] for s in samples]
    tail = stats.norm.cdf(np.sqrt(98 / 97) * stats.t.ppf(0.025, 97))  # Hesterberg 2015, for the smaller sample
    at_once = np.nanquantile(statistic(*resampled), [tail, 1 - tail])
    for values in (300, 5000, 2**40):
        monkeypatch.setattr(aggregation, "MAX_RESAMPLED_VALUES", values)
        assert statistic_interval(statistic, *samples) == pytest.approx(at_once, rel=1e-9)


def test_memory_of_a_bootstrap_does_not_grow_with_the_number_of_units() -> None:
    def peak(units: int) -> int:
        values = np.random.default_rng(0).normal(size=units)
        tracemalloc.start()
        statistic_interval(lambda resampled: resampled.mean(-1), values)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(8000) < 1.2 * peak(2000)


if __name__ == "__main__":
    print(*map(row, COVERAGE), sep="\n")
    print(*map(comparison_row, MEANS), sep="\n")
    print(*map(chosen_row, CHOSEN), sep="\n")


def test_a_share_of_fewer_than_three_trials_has_no_interval() -> None:
    """Two trials of one outcome each would otherwise differ surely from two of the other."""
    assert np.isnan(wilson_interval(1.0, 2)).all()
    assert np.isfinite(wilson_interval(1.0, 3)).all()
    low, _ = wilson_interval(pd.Series([0.5, 0.5]), pd.Series([2, 4]))
    assert low.isna().tolist() == [True, False]
