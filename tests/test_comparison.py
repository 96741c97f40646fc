"""Comparison of two runs: which results are compared, how differences get intervals, and heads that change roles."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel
from support.fake_runs import AFTER, BEFORE, DOCUMENTS, QUESTIONS, fake_run, mean_of
from support.refusals import assert_names

from headscope.rendering.comparison import print_comparison, signed
from headscope.results.comparison import Change, Comparison, change, compare
from headscope.results.pairing import RunPair
from headscope.results.result import Result
from headscope.runs.aggregation import wilson_interval
from headscope.runs.column_metadata import Role


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.results.collection.results_of_all_models", lambda run: run.results)
    monkeypatch.setattr("headscope.results.comparison.questions", lambda: QUESTIONS)


def test_difference_is_paired_by_equal_documents() -> None:
    first, second = fake_run([mean_of(BEFORE)], ["base"]), fake_run([mean_of(AFTER)], ["base"])
    (found,) = compare(first, second).changes
    differences = np.array(AFTER) - np.array(BEFORE)
    half = 2.5705818366147395 * differences.std(ddof=1) / math.sqrt(6)  # t(0.975, 5)
    assert found.n == 6
    assert found.difference == pytest.approx(0.15)
    assert (found.low, found.high) == pytest.approx((0.15 - half, 0.15 + half))
    assert found.direction == "worse", "a higher loss"


def test_difference_of_other_documents_of_the_same_name_is_unpaired() -> None:
    first, second = mean_of(BEFORE), mean_of(AFTER)
    (found,) = compare(fake_run([first], ["base"]), fake_run([second], ["base"], digest="other")).changes
    assert found.n is None
    half = math.hypot(first.half_width, second.half_width)
    assert (found.low, found.high) == pytest.approx((0.15 - half, 0.15 + half))
    assert found.direction == "no clear change"


def test_only_documents_that_both_runs_have_are_paired() -> None:
    later = mean_of(AFTER[:4], names=DOCUMENTS[:4])
    (found,) = compare(fake_run([mean_of(BEFORE)], ["base"]), fake_run([later], ["base"])).changes
    assert found.n == 4
    assert found.difference == pytest.approx(np.mean(AFTER[:4]) - np.mean(BEFORE[:4]))


def test_samples_without_a_digest_are_not_paired() -> None:
    runs = [fake_run([mean_of(values)], ["base"]) for values in (BEFORE, AFTER)]
    for run in runs:
        run.manifest["models"], run.manifest["inputs"] = [{"label": "base"}], {}
    assert compare(*runs).changes[0].n is None, "nothing says that the documents are the same"


def test_pairs_and_trials_are_paired_if_the_prompts_are_the_same() -> None:
    names = [f"ioi-{index}" for index in range(6)]
    results = [mean_of(values, "x.share", names) for values in (BEFORE, AFTER)]
    same = compare(fake_run([results[0]], ["base"]), fake_run([results[1]], ["base"])).changes[0]
    other = compare(fake_run([results[0]], ["base"]), fake_run([results[1]], ["base"], digest="other")).changes[0]
    assert (same.n, other.n) == (6, None)
    assert same.direction == "higher", "the question does not say what is better"


def change_of_outcomes(old: list[float], new: list[float], share: float = 1.0) -> Change:
    names = [f"trial-{index}" for index in range(len(old))]
    before, after = (mean_of(values, "x.share", names) for values in (old, new))
    runs = fake_run([before], ["base"]), fake_run([after], ["base"])
    return change(before, after, RunPair(*runs), share)


def test_paired_proportions_have_an_interval_by_newcombe() -> None:
    """An example of Newcombe 1998: 50 pairs, of which 36 are (1, 1), 12 (1, 0) and 2 (0, 1)."""
    counts = {(1, 1): 36, (1, 0): 12, (0, 1): 2}
    new, old = ([pair[side] for pair, count in counts.items() for _ in range(count)] for side in (0, 1))
    found = change_of_outcomes(old, new)
    assert found.n == 50
    assert (found.difference, found.low, found.high) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)


def test_equal_outcomes_of_few_trials_leave_the_difference_uncertain() -> None:
    found = change_of_outcomes([1.0] * 4, [1.0] * 4)
    assert (found.difference, found.low, found.high) == pytest.approx((0, -0.4899, 0.4899), abs=1e-3)
    assert change_of_outcomes([1.0] * 4, [1.0] * 4, share=0.9).low < 0


def test_estimates_and_values_without_interval_have_no_interval_of_the_difference() -> None:
    estimate = mean_of(AFTER, is_exact=False)
    (found,) = compare(fake_run([mean_of(BEFORE)], ["base"]), fake_run([estimate], ["base"])).changes
    assert found.direction == "no clear change" or math.isnan(found.low)
    few = Result(question="x.loss", model="base", value=1.0, n=2)
    (found,) = compare(fake_run([few], ["base"]), fake_run([few], ["base"])).changes
    assert found.direction == "unknown"


def test_values_of_two_selected_heads_are_not_paired() -> None:
    first, second = mean_of(BEFORE, layer=1, head=2), mean_of(AFTER, layer=3, head=4)
    (other_head,) = compare(fake_run([first], ["base"]), fake_run([second], ["base"])).changes
    assert other_head.n is None
    same_head = mean_of(AFTER, layer=1, head=2)
    assert compare(fake_run([first], ["base"]), fake_run([same_head], ["base"])).changes[0].n == 6


def test_the_surest_change_comes_first_and_unequal_keys_are_listed() -> None:
    sure, unsure = mean_of(AFTER), mean_of([1.0, 2.5, 2.5, 4.0, 5.0, 6.2], where={"context_length": 512})
    old = [mean_of(BEFORE, where={"context_length": 512}), mean_of(BEFORE), mean_of(BEFORE, model="gone")]
    new = [unsure, sure, mean_of(BEFORE, where={"context_length": 1024})]
    comparison = compare(fake_run(old, ["base", "gone"]), fake_run(new, ["base", "gone"]))
    assert [found.after for found in comparison.changes] == [sure, unsure]
    assert [result.model for result in comparison.only_before] == ["gone"]
    assert [result.where for result in comparison.only_after] == [{"context_length": 1024}]


def test_runs_of_one_model_each_are_compared_whatever_the_labels_are() -> None:
    first = fake_run([mean_of(BEFORE, model="step 1")], ["step 1"])
    second = fake_run([mean_of(AFTER, model="step 2")], ["step 2"])
    assert compare(first, second).changes[0].n == 6
    two = fake_run([mean_of(AFTER, model="step 2")], ["step 2", "step 3"])
    assert not compare(first, two).changes


def test_results_about_no_model_are_compared_if_only_one_run_has_models() -> None:
    runs = [fake_run([mean_of(BEFORE, model="")], ["base"]), fake_run([mean_of(AFTER, model="")], [])]
    assert [len(compare(*pair).changes) for pair in (runs, runs[::-1])] == [1, 1]


@pytest.mark.parametrize("digest", ["same", "other"])
def test_runs_that_differ_by_noise_have_no_clear_change(digest: str) -> None:
    """Paired and unpaired: at least 19 of 20 pairs of runs; single intervals call changes in most of them."""
    rng = np.random.default_rng(0)
    without, intervals_without_zero = 0, 0
    for _ in range(20):
        runs = []
        for _ in range(2):
            losses = rng.normal(5, 1, (60, 6))
            shares = (rng.random((20, 30)) < 0.6).astype(float)
            results = [mean_of([*row], where={"context_length": index}) for index, row in enumerate(losses)]
            trials = [f"trial-{index}" for index in range(30)]
            for index, row in enumerate(shares):
                low, high = wilson_interval(float(row.mean()), len(row))
                where = {"size": index}
                results.append(mean_of([*row], "x.share", trials, where=where, low=float(low), high=float(high)))
            runs.append(results)
        changes = compare(fake_run(runs[0], ["base"]), fake_run(runs[1], ["base"], digest=digest)).changes
        assert len(changes) == 80
        without += not any(item.is_clear for item in changes)
        intervals_without_zero += any(item.low > 0 or item.high < 0 for item in changes)
    assert without >= 19
    assert intervals_without_zero >= 10


def test_a_change_among_noise_is_clear_and_p_of_a_paired_mean_is_that_of_the_t_test() -> None:
    rng = np.random.default_rng(1)
    noise = [rng.normal(5, 1, 6).tolist() for _ in range(40)]
    earlier = [mean_of(row, where={"context_length": index}) for index, row in enumerate(noise)]
    later = [mean_of(rng.permutation(row).tolist(), where=one.where) for row, one in zip(noise, earlier, strict=True)]
    moved = mean_of(BEFORE), mean_of([value + 1 + 0.01 * index for index, value in enumerate(BEFORE)])
    changes = compare(fake_run([*earlier, moved[0]], ["base"]), fake_run([*later, moved[1]], ["base"])).changes
    assert [item.after for item in changes if item.is_clear] == [moved[1]]
    assert changes[0].p == pytest.approx(ttest_rel(*(list(one.by_sample.values()) for one in moved)).pvalue)
    assert changes[0].p_adjusted == pytest.approx(41 * changes[0].p)


def test_heads_that_gained_or_lost_a_role_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Role("score above 0.5", lambda heads: heads["score"] > 0.5, "score")
    for module in ("comparison", "comparison"):
        monkeypatch.setattr(f"headscope.results.{module}.roles", lambda: {"copying": role})
    monkeypatch.setattr("headscope.runs.column_metadata.roles", lambda: {"copying": role})

    def heads(*scores: float) -> pd.DataFrame:
        return pd.DataFrame({"model": "base", "layer": 3, "head": range(len(scores)), "score": scores})

    first = fake_run([], ["base"], heads=heads(0.9, 0.1, 0.7))
    second = fake_run([], ["base"], heads=heads(0.9, 0.6, 0.2))
    (found,) = compare(first, second).roles
    assert (found.gained, found.lost, found.before, found.after) == (((3, 1),), ((3, 2),), 2, 2)


numbers = st.floats(-100, 100).map(lambda value: round(value, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=6, max_size=6))
def test_swapping_the_runs_changes_the_sign_only(values: list[tuple[float, float]]) -> None:
    old, new = (mean_of([pair[side] for pair in values]) for side in (0, 1))
    for digest in ("same", "other"):
        runs = fake_run([old], ["base"]), fake_run([new], ["base"], digest)
        forward, backward = (
            change(first, second, RunPair(*pair))
            for (first, second), pair in (((old, new), runs), ((new, old), runs[::-1]))
        )
        assert isinstance(forward, Change)
        assert forward.difference == pytest.approx(-backward.difference, abs=1e-9)
        assert forward.low == pytest.approx(-backward.high, abs=1e-9)


def test_a_difference_that_is_not_zero_is_not_printed_as_zero() -> None:
    assert signed(0.0000551, ".3f") == "+5.5e-05"
    assert signed(-0.0000551, "percent") == "-0.0055 points"
    assert signed(0.001, "points") == "+0.1"
    assert signed(0.0, ".3f") == "+0.000"
    assert signed(0.25, "percent") == "+25 points"


def test_runs_without_common_results_are_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison("monday", "tuesday", Comparison((), (), (), ()), show_all=False)
    assert_names(capsys.readouterr().out, "monday", "tuesday", "in common")
