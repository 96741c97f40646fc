"""Results of the probe `measure`: each is the number of the tables, with its samples, and has a key of its own."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run

from headscope.base.heads import format_head
from headscope.results.collection import all_results
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice, mean_result
from headscope.results.words import headline, sentence
from headscope.runs.column_metadata import heads_with_role, statistic
from headscope.runs.run import Run
from probes.measure.analysis import ROLES
from probes.measure.results import head_results, results

LENGTHS = (256, 512)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn"), lengths=LENGTHS, pairs=2)


@pytest.fixture(scope="module")
def by_key(run: Run) -> dict[tuple[str, ...], Result]:
    return {result.key: result for result in results(run)}


@pytest.mark.slow
def test_every_result_of_a_run_has_a_key_of_its_own(run: Run) -> None:
    keys = [result.key for result in all_results(run)]
    assert len(keys) == len({*keys})


@pytest.mark.slow
def test_losses_at_each_length_are_means_over_documents(run: Run, by_key: dict[tuple[str, ...], Result]) -> None:
    nll = run.nll.astype({"nll": "float64", "model": "str", "doc": "str"})
    for length in LENGTHS:
        rows = nll[nll["context_length"] == length]
        losses = {
            label: block.groupby("doc").apply(lambda doc: np.average(doc["nll"], weights=doc["tokens"]))
            for label, block in rows.groupby("model")
        }
        for label, expected in losses.items():
            loss = by_key["loss.mean", label, "", f"context_length={length}"]
            assert loss.by_sample == pytest.approx(expected.to_dict())
            assert (loss.value, loss.n) == (pytest.approx(expected.mean()), len(expected))
            assert loss.low < loss.value < loss.high
        difference = by_key["loss.difference", "yarn", "base", f"context_length={length}"]
        paired = losses["yarn"] - losses["base"]
        assert difference.by_sample == pytest.approx(paired.to_dict())
        half = t.ppf(0.975, len(paired) - 1) * paired.std(ddof=1) / math.sqrt(len(paired))
        assert (difference.low, difference.high) == pytest.approx((paired.mean() - half, paired.mean() + half))


@pytest.mark.slow
def test_medians_and_counts_are_those_of_the_heads_table(run: Run, by_key: dict[tuple[str, ...], Result]) -> None:
    for model in run.models:
        heads, where = run.heads[run.heads["model"] == model], "context_length=512"
        expected = {
            "length.median": heads["ess2_512"].median(),
            "length.local": (heads["ess2_512"] < 8).sum(),
            "length.sinks": (heads["sink_mass"] > 0.5).mean(),
            "growth.median": heads["growth"].median(),
            "growth.constant": (heads["growth"] < 0.25).sum(),
            "growth.widening": (heads["growth"] > 0.75).sum(),
        }
        for question, value in expected.items():
            result = by_key[question, model, "", where]
            assert (result.value, result.n) == (pytest.approx(value), len(heads)), question


def test_the_longest_effective_length_has_an_interval_that_allows_for_the_choice(
    run: Run, by_key: dict[tuple[str, ...], Result]
) -> None:
    heads = run.heads[run.heads["model"] == "base"]
    row = heads.loc[heads["ess2_512"].idxmax()]
    longest = by_key["length.extreme", "base", "", "context_length=512", "which=longest"]
    assert (longest.value, longest.unit) == (row["ess2_512"], format_head(row["layer"], row["head"]))
    assert longest.selected_from == len(heads)
    degrees = longest.n - 1
    ratio = t.ppf(1 - 0.025 / len(heads), degrees) / t.ppf(0.975, degrees)
    expected = math.log(row["ess2_512_high"] / row["ess2_512"]) * ratio
    assert math.log(longest.high / longest.value) == pytest.approx(expected, rel=1e-5)
    assert_names(sentence(longest), len(heads))


def test_the_interval_of_the_largest_of_many_null_units_covers_zero() -> None:
    """The pointwise interval of the largest of 40 units over 8 samples covers 0 in about half of the draws."""
    rng = np.random.default_rng(0)
    covered = {"pointwise": 0, "simultaneous": 0}
    for _ in range(200):
        values = pd.DataFrame(rng.normal(size=(40, 8)))
        best = mean_result("length.extreme", values.loc[values.mean(axis=1).idxmax()])
        simultaneous = allow_for_choice(best, len(values), (-math.inf, math.inf))
        covered["pointwise"] += best.low <= 0 <= best.high
        covered["simultaneous"] += simultaneous.low <= 0 <= simultaneous.high
    assert covered["pointwise"] < 120
    assert covered["simultaneous"] >= 190


def test_a_choice_keeps_the_interval_within_the_limits() -> None:
    result = Result(question="length.extreme", value=0.95, low=0.85, high=1.0, n=5)
    selected = allow_for_choice(result, 100, (0.0, 1.0))
    assert selected.high == 1.0
    assert 0.0 <= selected.low < 0.85
    assert allow_for_choice(result, 1, (0.0, 1.0)) == result


def test_the_sentence_about_a_head_has_its_roles_or_says_that_it_has_none(run: Run) -> None:
    base = run.heads[run.heads["model"] == "base"].set_index(["layer", "head"])
    for layer, head in base.index:
        statement, ranks = head_results(run, "base", layer, head)
        roles = [role for role in ROLES if heads_with_role(base.loc[[(layer, head)]], role).any()]
        assert statement.details["roles"] == roles
        assert statement.details["missing_roles"] == ("" if roles else ", ".join(ROLES))
        assert_names(sentence(statement), *(roles or ROLES))
        assert (ranks.question, ranks.where["statistic"]) == ("heads.ranks", statistic("ess2_512").label)
        (rank,) = (part for part in ranks.parts if part.model == "base")
        assert rank.value == (base["ess2_512"] > base.loc[(layer, head), "ess2_512"]).sum() + 1


def test_headlines_are_one_short_line(run: Run) -> None:
    lines = [headline(result) for result in results(run) if questions()[result.question].level == "headline"]
    assert len(lines) >= 6
    assert not [line for line in lines if len(line) > 100]
