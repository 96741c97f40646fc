"""Effects that are ratios: over a set of pairs the ratio of means, with Fieller's interval."""

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from headscope.results.effects.ranking import largest_unit
from headscope.results.effects.sweep import Effects, Sweep, sweep_effects
from headscope.results.effects.units import head_columns, unit_result
from headscope.runs.aggregation import linearise_ratios, ratio_of_means_interval

FloatArray = npt.NDArray[np.float64]
SWEEP = Sweep(keys=("model",), sample="pair", value="effect", weight="difference", units=("layer",))
CHANGES = arrays(np.float64, st.tuples(st.integers(1, 3), st.just(6)), elements=st.floats(-4, 4))
GAPS = arrays(np.float64, 6, elements=st.floats(0.5, 11))


def effects_of(ratios: FloatArray, differences: FloatArray) -> Effects:
    """A sweep with a layer per row of ratios [layers, pairs]."""
    layer, pair = np.indices(ratios.shape).reshape(2, -1)
    rows = pd.DataFrame({"model": "base", "layer": layer, "pair": pair, "effect": ratios.ravel()})
    (effects,) = sweep_effects(rows.assign(difference=differences[pair]), SWEEP, ["base"])
    return effects


@given(changes=CHANGES, gaps=GAPS)
def test_an_effect_over_pairs_is_the_ratio_of_means_and_its_values_average_to_it(
    changes: FloatArray, gaps: FloatArray
) -> None:
    effects = effects_of(changes / gaps, gaps)
    expected = changes.mean(axis=1) / gaps.mean()
    assert effects.units["effect"].to_numpy() == pytest.approx(expected, abs=1e-9)
    assert effects.units["mean_of_ratios"].to_numpy() == pytest.approx((changes / gaps).mean(axis=1), abs=1e-9)
    assert effects.values.mean(axis=1).to_numpy() == pytest.approx(expected, abs=1e-9)


@given(change=st.floats(-4, 4), gap=st.floats(0.5, 11), sign=st.sampled_from([-1, 1]))
def test_the_ratio_of_means_of_one_prompt_is_its_ratio(change: float, gap: float, sign: int) -> None:
    effects = effects_of(np.array([[change / gap]]), np.array([sign * gap]))
    assert effects.units["effect"].item() == pytest.approx(change / gap, abs=1e-12)


@given(changes=CHANGES, gaps=GAPS, factor=st.floats(0.1, 10))
def test_a_metric_that_falls_or_has_another_unit_gives_the_same_effect(
    changes: FloatArray, gaps: FloatArray, factor: float
) -> None:
    plain, scaled = (effects_of(changes / gaps, sign * gaps).units for sign in (1.0, -factor))
    columns = ["effect", "low", "high", "p"]
    np.testing.assert_allclose(scaled[columns], plain[columns], atol=1e-7, rtol=1e-7)


@given(changes=CHANGES, gaps=GAPS, candidate=st.floats(-3, 3))
def test_the_interval_has_the_ratios_that_a_t_test_does_not_reject(
    changes: FloatArray, gaps: FloatArray, candidate: float
) -> None:
    """Fieller 1954: the ratio R is inside unless the mean of change - R difference differs from 0."""
    weights = np.broadcast_to(gaps, changes.shape)
    low, high = ratio_of_means_interval(linearise_ratios(changes, weights), weights)
    for unit, (lower, upper) in enumerate(zip(low, high, strict=True)):
        if np.isnan(lower) or min(abs(candidate - lower), abs(candidate - upper)) < 1e-6:
            continue
        residual = changes[unit] - candidate * gaps
        rejects = bool(stats.ttest_1samp(residual, 0).pvalue < 0.05) if residual.std() else bool(residual.any())
        assert (lower < candidate < upper) != rejects


def test_a_pair_with_a_small_difference_does_not_dominate() -> None:
    """Twelve pairs with gaps of 1 to 11 logits: one ratio of 3.68 made a mean of 0.93 with an interval around 0."""
    gaps = np.linspace(11, 1, 12)
    ratios = np.array([[0.6, 0.5, 0.7, 0.55, 0.65, 0.6, 0.5, 0.7, 0.6, 0.65, 0.6, 3.68]])
    effects = effects_of(ratios, gaps)
    unit = effects.units.iloc[0]
    assert unit["mean_of_ratios"] > 0.85
    assert unit["effect"] == pytest.approx((ratios * gaps).sum() / gaps.sum())
    assert 0.5 < unit["low"] < unit["effect"] < unit["high"] < 0.8
    assert unit["p_adjusted"] < 1e-4
    result = unit_result(effects, unit, "patching.top")
    assert np.mean([*result.by_sample.values()]) == pytest.approx(result.value)
    assert result.details["mean_of_ratios"] == pytest.approx(ratios.mean())


def test_without_a_clear_mean_difference_there_is_no_interval() -> None:
    effects = effects_of(np.array([[0.5, 0.6, 0.4, 0.7]]), np.array([2.0, -2.0, 1.0, -0.5]))
    assert effects.units[["low", "high"]].isna().all(axis=None)
    few = effects_of(np.array([[0.5, 0.6]]), np.array([2.0, 1.0]))
    assert few.units[["low", "high", "p"]].isna().all(axis=None)


def test_the_interval_of_the_largest_of_several_effects_allows_for_the_choice() -> None:
    rng = np.random.default_rng(0)
    gaps = rng.uniform(2, 6, 8)
    effects = effects_of(rng.normal(0.1, 0.2, (5, 8)), gaps)
    largest = largest_unit(effects)
    plain = effects.units.loc[effects.units["effect"].idxmax()]
    assert largest["low"] < plain["low"] < plain["high"] < largest["high"]


def test_pairs_that_were_not_patched_are_left_out_of_both_means() -> None:
    ratios, gaps = np.array([[0.5, np.nan, 1.0], [0.2, 0.3, 0.4]]), np.array([4.0, 2.0, 1.0])
    rows = effects_of(ratios, gaps).units
    assert rows["effect"].tolist() == pytest.approx([(0.5 * 4 + 1.0) / 5, (0.2 * 4 + 0.3 * 2 + 0.4) / 7])
    assert rows["n"].tolist() == [2, 3]


def test_an_interval_that_only_the_choice_opens_is_that_of_the_linearised_ratios() -> None:
    """Four pairs and 270 exact heads: the mean difference is clear, but not at the level of 1 in 270 tests."""
    rng = np.random.default_rng(1)
    effects = effects_of(rng.normal(0.1, 0.2, (270, 4)), np.array([2.0, 3.0, 4.0, 3.5]))
    largest, plain = largest_unit(effects), effects.units.loc[effects.units["effect"].idxmax()]
    assert np.isfinite([plain["low"], plain["high"]]).all()
    assert largest["low"] < plain["low"] < plain["high"] < largest["high"]
    assert np.isfinite([largest["low"], largest["high"]]).all()


def test_a_per_head_column_over_sets_weights_every_pair_alike_whatever_the_metric_of_its_set() -> None:
    """Sets of 2 and 3 pairs with differences of about 1 and 10 logits: 2/5 and 3/5 of their ratios of means."""
    differences = {"small": [1.0, 1.2], "large": [9.0, 10.0, 12.0]}
    ratios = {"small": [0.9, 0.7], "large": [0.1, 0.2, 0.3]}
    rows = pd.DataFrame(
        [
            {"model": "base", "prompts": name, "pair": f"{name} {n}", "effect": ratio, "difference": gap}
            for name, gaps in differences.items()
            for n, (gap, ratio) in enumerate(zip(gaps, ratios[name], strict=True))
        ]
    )
    rows = rows.assign(layer=0, kv_group=0, head=0, method="exact", column="patching_z", doc=rows["pair"])
    geometry = {"layers": 1, "heads": 1, "kv_groups": 1}
    run = SimpleNamespace(manifest={"models": [{"label": "base", "geometry": geometry}]})
    sweep = Sweep(keys=("model", "prompts"), sample="pair", value="effect", weight="difference")
    value = head_columns(run, rows, sweep)["patching_z"].item()  # type: ignore[arg-type]
    by_set = {name: np.average(ratios[name], weights=differences[name]) for name in ratios}
    assert value == pytest.approx((2 * by_set["small"] + 3 * by_set["large"]) / 5)
