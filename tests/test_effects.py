"""Effects of units: statistics against numpy and scipy by hand, and laws that hold for all tables."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from headscope.results import words
from headscope.results.effects import statistics
from headscope.results.effects.comparison import agreements, compare_effects, compared_units, largest_change
from headscope.results.effects.prompts import subset_result, subset_sweeps
from headscope.results.effects.ranking import largest_unit, margin_over_rank, rank, select_units
from headscope.results.effects.results import sweep_questions, sweep_results
from headscope.results.effects.sweep import (
    Effects,
    Sweep,
    best_method_rows,
    effects_table,
    shared_samples,
    sweep_effects,
    with_mean_estimates,
)
from headscope.results.effects.units import estimate_marks, unit_name, unit_nouns, unit_result, units_of_head
from headscope.results.result import Result
from headscope.runs.aggregation import confidence_interval

SWEEP = Sweep(keys=("model", "prompts"), sample="pair", value="effect", methods=("exact", "damped", "estimate"))
TABLES = arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(3, 6)), elements=st.floats(-5, 5, width=16))


def table(values: np.ndarray, method: str = "exact", model: str = "base") -> pd.DataFrame:
    """Rows of an array [units, samples]: four heads a layer, two a KV group."""
    units, samples = np.indices(values.shape)
    return pd.DataFrame(
        {
            "model": model,
            "prompts": "ioi",
            "layer": (units // 4).ravel(),
            "kv_group": (units % 4 // 2).ravel(),
            "head": (units % 4).ravel(),
            "pair": [f"pair {number}" for number in samples.ravel()],
            "method": method,
            "effect": values.ravel(),
        }
    )


def effects_of(*rows: pd.DataFrame) -> Effects:
    (effects,) = sweep_effects(pd.concat(rows, ignore_index=True), SWEEP, ["base"])
    return effects


RNG = np.random.default_rng(0)
VALUES = RNG.normal(0.3, 1, (8, 6))


# Independent references --------------------------------------------------------------------------------------------


def test_mean_interval_and_p_equal_scipys() -> None:
    units = effects_of(table(VALUES)).units
    for row, values in zip(units.to_dict("records"), VALUES, strict=True):
        low, high = stats.t.interval(0.95, 5, values.mean(), stats.sem(values))
        expected = (values.mean(), low, high, stats.ttest_1samp(values, 0).pvalue)
        assert [row[name] for name in ("effect", "low", "high", "p")] == pytest.approx(expected)
    assert units["p_adjusted"].to_numpy() == pytest.approx(stats.false_discovery_control(units["p"]))
    assert set(units["n"]) == {6}


def test_missing_samples_are_left_out_of_a_unit() -> None:
    rows = table(VALUES)
    rows = rows[~((rows["head"] == 1) & (rows["pair"] == "pair 0"))]
    units = effects_of(rows).units
    assert units["n"].to_list() == [6, 5, 6, 6, 6, 5, 6, 6]
    assert units["effect"][1] == pytest.approx(VALUES[1, 1:].mean())
    assert units["p"][1] == pytest.approx(stats.ttest_1samp(VALUES[1, 1:], 0).pvalue)


def test_two_samples_give_no_interval_and_no_p() -> None:
    units = effects_of(table(VALUES[:, :2])).units
    assert units[["low", "high", "p", "p_adjusted"]].isna().all(axis=None)
    assert units["effect"].to_numpy() == pytest.approx(VALUES[:, :2].mean(axis=1))


def test_estimates_have_no_interval_and_no_p_but_count_as_tests() -> None:
    effects = effects_of(table(VALUES[:3]), table(VALUES + 0.1, "estimate"))
    exact, estimated = effects.units[effects.is_exact], effects.units[~effects.is_exact]
    assert set(estimated["method"]) == {"estimate"}
    assert estimated[["low", "high", "p", "p_adjusted"]].isna().all(axis=None)
    with_tests = stats.false_discovery_control([*exact["p"], *[1.0] * 5])
    assert exact["p_adjusted"].to_numpy() == pytest.approx(with_tests[:3])
    estimate, measured = (unit_result(effects, block.iloc[0], "x") for block in (estimated, exact))
    assert (estimate.is_exact, estimate.has_interval, np.isnan(estimate.p_adjusted)) == (False, False, True)
    assert (measured.is_exact, measured.has_interval, np.isnan(measured.p_adjusted)) == (True, True, False)
    assert estimate_marks(effects) == ["", "", "", "~", "~", "~", "~", "~"]


def test_a_unit_counts_by_its_most_accurate_method() -> None:
    rows = [table(VALUES[:2]), table(VALUES[:4] + 1, "damped"), table(VALUES + 2, "estimate")]
    effects = effects_of(*rows)
    assert effects.units["method"].to_list() == ["exact"] * 2 + ["damped"] * 2 + ["estimate"] * 4
    assert effects.units["effect"].to_numpy() == pytest.approx(VALUES.mean(axis=1) + np.array([0, 0, 1, 1, 2, 2, 2, 2]))
    best = best_method_rows(pd.concat(rows), SWEEP)
    assert best.groupby("method").size().to_dict() == {"exact": 12, "damped": 12, "estimate": 24}
    assert [(one.method, one.compared) for one in agreements(effects)] == [("damped", 2), ("estimate", 2)]


def test_agreement_is_over_the_samples_that_were_measured() -> None:
    noise = RNG.normal(0, 0.1, VALUES.shape)
    exact = table(VALUES[:5])
    effects = effects_of(exact[exact["pair"] != "pair 0"], table(VALUES + noise, "estimate"))
    units = compared_units(effects, "estimate")
    estimate, measured = (VALUES + noise)[:5, 1:].mean(axis=1), VALUES[:5, 1:].mean(axis=1)
    assert units["estimate"].to_numpy() == pytest.approx(estimate)
    (agreement,) = agreements(effects)
    assert agreement.spearman == pytest.approx(stats.spearmanr(estimate, measured).statistic)
    assert agreement.pearson == pytest.approx(np.corrcoef(estimate, measured)[0, 1])
    assert agreement.largest_error == pytest.approx(np.abs(estimate - measured).max())
    unmeasured = np.abs((VALUES + noise)[5:].mean(axis=1)) + agreement.largest_error
    assert agreement.may_exceed == (unmeasured > np.abs(measured).max()).sum()
    assert (agreement.compared, agreement.unmeasured, agreement.shared, agreement.top) == (5, 3, 2, 2)


def test_agreement_is_marked_if_the_estimates_selected_the_units() -> None:
    values = np.linspace(4, 0.1, 8)[:, None] + 1e-3 * VALUES
    rows = table(values)
    effects = effects_of(rows[(rows["layer"] == 0) | (rows["head"] > 0)], table(values, "estimate"))
    (agreement,) = agreements(effects)
    assert (agreement.compared, agreement.selected, agreement.unmeasured) == (7, 6, 1)
    assert np.isnan(agreement.others_spearman)
    few = rows[rows["head"].isin([0, 3]) | ((rows["layer"] == 1) & (rows["head"] == 2))]
    (agreement,) = agreements(effects_of(few, table(values, "estimate")))
    assert (agreement.compared, agreement.selected) == (5, 3)
    every_unit = effects_of(rows, table(values, "estimate"))
    assert agreements(every_unit)[0].selected == 0


def test_rank_correlation_has_the_interval_of_bonett_and_wright() -> None:
    first, second = pd.Series(RNG.normal(size=30)), pd.Series(RNG.normal(size=30))
    rho = stats.spearmanr(first, second).statistic
    half_width = stats.norm.ppf(0.975) * np.sqrt((1 + rho**2 / 2) / 27)
    expected = (rho, *np.tanh(np.arctanh(rho) + np.array([-half_width, half_width])))
    assert statistics.rank_correlation(first, second) == pytest.approx(expected)
    assert np.isnan(statistics.rank_correlation(first[:2], second[:2])).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(statistics.rank_correlation(first, first * 0)).all()


def test_the_largest_unit_has_an_interval_for_all_measured_units() -> None:
    effects = effects_of(table(VALUES[:4]), table(VALUES + 9, "estimate"))
    largest = largest_unit(effects)
    values = VALUES[:4][VALUES[:4].mean(axis=1).argmax()]
    expected = stats.t.interval(1 - 0.05 / 4, 5, values.mean(), stats.sem(values))
    assert (largest["low"], largest["high"], largest["selected_from"]) == pytest.approx((*expected, 4))
    result = unit_result(effects, largest, "x", details={"a": 1})
    assert (result.value, result.selected_from, result.n, result.where) == (largest["effect"], 4, 6, {"prompts": "ioi"})
    assert [*result.by_sample.values()] == pytest.approx(values.tolist())
    assert largest_unit(effects, ascending=True)["effect"] == VALUES[:4].mean(axis=1).min()
    assert largest_unit(effects_of(table(-VALUES, "estimate")), by_size=True)["method"] == "estimate"


@pytest.mark.parametrize("selects_by_estimates", [False, True])
def test_the_interval_of_the_largest_of_many_covers_its_true_effect(selects_by_estimates: bool) -> None:
    """Without an effect, the plain interval of the largest of 100 covers 0 far too rarely."""
    plain, corrected, tables = 0, 0, 300
    for _ in range(tables):
        values = RNG.normal(size=(100, 8))
        if selects_by_estimates:
            values = values[select_units(np.square(values).mean(axis=1), 10, 10, [0])]
        top = values[values.mean(axis=1).argmax()][None]
        plain += abs(top.mean()) <= stats.t.ppf(0.975, 7) * stats.sem(top[0])
        low, high = confidence_interval(top, choices=len(values))[:, 0]
        corrected += low <= 0 <= high
    assert plain / tables < 0.8
    assert corrected / tables >= 0.95


def test_top_share_gini_and_margin_by_hand() -> None:
    values = np.ones((40, 3))
    values[3], values[7] = 31, 11
    values[9] = -5
    assert statistics.top_unit_count(40) == 2
    assert statistics.top_share(values.mean(axis=1)) == pytest.approx(42 / (42 + 37))
    assert statistics.top_share_interval(pd.DataFrame(values)) == pytest.approx((42 / 79, 42 / 79))
    assert statistics.gini([0, 0, 0, 1]) == 0.75
    assert statistics.gini([2, 2]) == statistics.gini([0, 0]) == 0
    effects = effects_of(table(VALUES))
    order = np.argsort(-VALUES.mean(axis=1))
    differences = VALUES[order[0]] - VALUES[order[1:]]
    means, errors = differences.mean(axis=1), stats.sem(differences, axis=1)
    lows = sorted(means - stats.t.ppf(1 - 0.025 / 2, 5) * errors)
    highs = sorted(means + stats.t.ppf(1 - 0.025 / (len(means) - 1), 5) * errors)
    expected = (means[1], lows[1], highs[1])
    assert margin_over_rank(effects, effects.units.iloc[order[0]], 2) == pytest.approx(expected)
    assert rank(effects.units["effect"], effects.units["effect"][order[2]]) == 3


def test_interval_of_the_top_share_equals_fieller_by_hand() -> None:
    """Below: chosen on the other half by all that seem positive. Above: the largest by those of the other half."""
    values = RNG.normal(0.5, 1, size=(30, 7)) + np.where(np.arange(30) < 2, 8, 0)[:, None]
    even, odd = values[:, ::2].mean(axis=1), values[:, 1::2].mean(axis=1)
    top, rises = np.empty(7), np.empty(7)
    for sample in range(7):
        means = odd if sample % 2 == 0 else even
        top[sample] = values[np.argsort(means)[-2:], sample].sum()
        rises[sample] = values[means > 0, sample].sum()
    all_means = values.mean(axis=1)
    seeming_top, seeming_rises = values[np.argsort(all_means)[-2:]].sum(axis=0), values[all_means > 0].sum(axis=0)

    def is_excluded(share: float, numerators: Any, denominators: Any) -> bool:
        return bool(stats.ttest_1samp(numerators - share * denominators, 0).pvalue < 0.05)

    low, high = statistics.top_share_interval(pd.DataFrame(values))
    assert 0 < low < statistics.top_share(all_means) < high < 1
    assert is_excluded(low - 1e-6, top, seeming_rises)
    assert not is_excluded(low + 1e-6, top, seeming_rises)
    assert is_excluded(high + 1e-6, seeming_top, rises)
    assert not is_excluded(high - 1e-6, seeming_top, rises)


def test_without_any_effect_the_top_share_may_be_anything_above_little() -> None:
    low, high = statistics.top_share_interval(pd.DataFrame(RNG.normal(size=(90, 8))))
    assert low < 0.5
    assert high == 1


def test_models_are_compared_over_the_samples_that_both_have() -> None:
    other = VALUES + RNG.normal(0.5, 0.2, VALUES.shape)
    rows = pd.concat(
        [table(VALUES), table(other[:6, 1:], model="yarn").replace({f"pair {i}": f"pair {i + 1}" for i in range(5)})]
    )
    before, after = sweep_effects(rows, SWEEP, ["base", "yarn"])
    comparison = compare_effects(before, after)
    changes = (other - VALUES)[:6, 1:]
    assert comparison.n == 5
    assert comparison.units["change"].to_numpy() == pytest.approx(changes.mean(axis=1))
    low, high = stats.t.interval(1 - 0.05 / 6, 4, changes[0].mean(), stats.sem(changes[0]))
    assert (comparison.units["low"][0], comparison.units["high"][0]) == pytest.approx((low, high))
    assert largest_change(comparison.units)["change"] == pytest.approx(changes.mean(axis=1).max())
    means = VALUES[:6, 1:].mean(axis=1), other[:6, 1:].mean(axis=1)
    assert comparison.rank_correlation[0] == pytest.approx(stats.spearmanr(*means).statistic)


def test_samples_count_if_they_do_in_every_model_that_has_any() -> None:
    pairs = {"base": ["a", "b", "c"], "yarn": ["b", "c", "d"]}
    samples = pd.DataFrame(
        [(model, "ioi", pair) for model, names in pairs.items() for pair in names], columns=["model", "prompts", "pair"]
    )
    assert shared_samples(samples, ["prompts"], "pair")["pair"].to_list() == ["b", "c"]


def test_estimates_stored_as_means_join_measured_units() -> None:
    sweep = Sweep(keys=("model",), sample="pair", value="effect", units=("path",), methods=("exact", "estimate"))
    rows = table(VALUES[:2]).rename(columns={"head": "path"})
    (measured,) = sweep_effects(rows, sweep, ["base"])
    means = pd.DataFrame({"estimate": [0.5, 0.25, 2.0], "n": 4}, index=[1, 0, 5])
    effects = with_mean_estimates(measured, sweep, {"model": "base"}, means)
    assert effects.units["path"].to_list() == [0, 1, 5]
    assert effects.units["method"].to_list() == ["exact", "exact", "estimate"]
    assert effects.units["n"].to_list() == [6, 6, 4]
    assert effects.units["effect"].to_numpy() == pytest.approx([*VALUES[:2].mean(axis=1), 2.0])
    assert np.isnan(effects.units["p"][2])
    assert compared_units(effects, "estimate")["estimate"].to_list() == [0.25, 0.5]
    estimated = with_mean_estimates(None, sweep, {"model": "base"}, means)
    assert estimated.units["effect"].to_list() == [0.25, 0.5, 2.0]
    assert unit_result(effects, largest_unit(effects), "x").layer is None


def test_units_have_names() -> None:
    units = pd.DataFrame({"layer": [3, 3], "kv_group": [0, 1], "head": [1, -1]})
    assert [unit_name(unit) for _, unit in units.iterrows()] == ["L3H1", "L3 KV group 1"]
    assert unit_nouns(units) == "heads and KV groups"
    assert [unit_nouns(units[:1]), unit_nouns(units[1:])] == ["heads", "KV groups"]
    assert effects_table([effects_of(table(VALUES))])["prompts"].unique() == ["ioi"]


def test_the_units_of_a_head_are_the_head_or_its_kv_group() -> None:
    effects = effects_of(table(VALUES))
    (unit,) = units_of_head(effects, 1, 3, 1)
    pd.testing.assert_series_equal(unit, effects.units.iloc[7])
    assert units_of_head(effects, 1, 3, 0) == []
    groups = effects_of(table(VALUES[::2]).assign(kv_group=lambda rows: rows["head"], head=-1))
    assert [unit["kv_group"] for unit in units_of_head(groups, 0, 5, 2)] == [2]


# Results -----------------------------------------------------------------------------------------------------------

QUESTIONS = {
    question.name: question
    for question in sweep_questions("x", "{prompts} in {model}", "{prompts}", number="+.2f", samples="pairs")
}
LABELS = {"damped": "damped estimates", "estimate": "estimates"}


def results_of(monkeypatch: pytest.MonkeyPatch, *rows: pd.DataFrame) -> dict[str, list[Result]]:
    """Results of a sweep, by question; their keys differ, and each has a sentence."""
    monkeypatch.setattr("headscope.results.words.questions", lambda: QUESTIONS)
    effects = effects_of(*rows)
    results = [*sweep_results(effects, "x", unit_nouns(effects.units), {}, estimate_labels=LABELS)]
    assert len({result.key for result in results}) == len(results)
    by_question: dict[str, list[Result]] = {}
    for result in results:
        assert words.sentence(result)
        by_question.setdefault(result.question.removeprefix("x."), []).append(result)
    return by_question


def test_results_of_a_sweep_name_the_choice_the_tests_and_the_units_of_the_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, estimates = table(VALUES[:4] + 5), table(VALUES, "estimate")
    results = results_of(monkeypatch, exact, estimates)
    assert [*results] == ["top", "lowest", "significant", "unmeasured"], "an agreement needs ten heads"
    top, significant = results["top"][0], results["significant"][0]
    assert (top.selected_from, top.n, top.is_exact) == (4, 6, True)
    numbers = {"exact": 4, "rate": 0.05, "units": 8, "nouns": "heads", "estimated": 4}
    assert numbers.items() <= significant.details.items()
    many = np.vstack([VALUES] * 3)
    exact, estimates = table(many[:12] + 5), table(many, "estimate")
    (agreement,) = results_of(monkeypatch, exact, estimates)["agreement"]
    assert (agreement.details["compared"], agreement.details["nouns"]) == (12, "heads")
    assert agreement.details["selected"]
    assert len(results_of(monkeypatch, exact, table(many, "damped"), estimates)["agreement"]) == 2


def test_results_of_estimates_and_of_two_samples_claim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated = results_of(monkeypatch, table(VALUES, "estimate"))
    assert [*estimated] == ["top", "lowest", "estimated"]
    assert all((estimated[name][0].is_exact, estimated[name][0].n) == (False, 6) for name in ("top", "lowest"))
    two = results_of(monkeypatch, table(VALUES[:, :2]))
    assert [*two] == ["top", "lowest"]
    assert (two["top"][0].n, two["top"][0].has_interval) == (2, False)
    every_unit = results_of(monkeypatch, table(VALUES).assign(head=-1).drop_duplicates(["kv_group", "layer", "pair"]))
    (significant,) = every_unit["significant"]
    assert {"units": 4, "nouns": "KV groups", "estimated": None}.items() <= significant.details.items()


def test_without_a_positive_effect_the_headline_calls_none_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    top = results_of(monkeypatch, table(-np.abs(VALUES) - 0.001))["top"][0]
    assert "no effect is positive" in words.headline(top)
    prompts = pd.DataFrame({"model": "base", "prompts": "ioi", "metric": "logprob", "pair": ["a", "b"]})
    rows = table(-np.abs(VALUES[:, :2]) - 0.001).assign(metric="logprob")
    sweep = replace(SWEEP, keys=(*SWEEP.keys, "metric"))
    for effects in subset_sweeps(rows, sweep, ["base"]):
        result = subset_result(effects, "x.pair", prompts, {})
        assert result.value == effects.units["effect"].min()


# Laws --------------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(TABLES, st.randoms(use_true_random=False))
def test_order_of_samples_and_of_rows_changes_nothing(values: np.ndarray, random: object) -> None:
    rows = table(values)
    shuffled = rows.sample(frac=1, random_state=random.randrange(1000))  # type: ignore[attr-defined]
    first, second = effects_of(rows), effects_of(shuffled)
    pd.testing.assert_frame_equal(first.units, second.units)
    renamed = effects_of(rows.assign(pair=rows["pair"].map(lambda name: name[::-1])))
    pd.testing.assert_frame_equal(first.units, renamed.units, rtol=1e-6, atol=1e-9)


@settings(max_examples=10, deadline=None)
@given(TABLES, st.sampled_from([0.5, 2.0, -4.0]))
def test_scaling_scales_effects_and_intervals_and_not_p(values: np.ndarray, factor: float) -> None:
    units, scaled = effects_of(table(values)).units, effects_of(table(factor * values)).units
    ends = ["low", "high"] if factor > 0 else ["high", "low"]
    np.testing.assert_allclose(scaled[["effect", "low", "high"]], factor * units[["effect", *ends]])
    np.testing.assert_allclose(scaled[["p", "p_adjusted"]], units[["p", "p_adjusted"]])


@settings(max_examples=10, deadline=None)
@given(TABLES)
def test_adjusted_p_is_monotone_and_at_least_p(values: np.ndarray) -> None:
    units = effects_of(table(values), table(values[:1] + 1, "estimate")).units.sort_values("p")
    assert (units["p_adjusted"] >= units["p"]).all()
    assert units["p_adjusted"].is_monotonic_increasing
    assert units["p_adjusted"].le(1).all()


@settings(max_examples=10, deadline=None)
@given(TABLES, st.integers(1, 300))
def test_simultaneous_interval_contains_the_plain_one(values: np.ndarray, units: int) -> None:
    low, high = confidence_interval(values, choices=units)
    plain_low, plain_high = confidence_interval(values)
    assert (low <= plain_low).all()
    assert (high >= plain_high).all()
    measured = effects_of(table(values)).units
    np.testing.assert_allclose(plain_low, measured["low"])
    np.testing.assert_allclose(plain_high, measured["high"])


@settings(max_examples=10, deadline=None)
@given(arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 9, width=16)), st.integers(0, 9), st.integers(0, 9))
def test_selection_holds_the_top_and_distinct_seeded_others(squares: np.ndarray, top: int, drawn: int) -> None:
    selected = select_units(squares, top, drawn, [1])
    assert len({*selected.tolist()}) == len(selected) == min(top + drawn, len(squares))
    others = np.setdiff1d(np.arange(len(squares)), selected[:top])
    if top and len(others):
        assert squares[selected[:top]].min() >= squares[others].max()
    assert selected.tolist() == select_units(squares, top, drawn, [1]).tolist()
