"""Results: wording, verdicts and what would decide them, ranking, and the table of all results."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.refusals import assert_names

from headscope.base import plugins
from headscope.probe import Probe
from headscope.results import collection, words
from headscope.results import questions as registry
from headscope.results.head_results import top_head_result
from headscope.results.questions import Question
from headscope.results.ranking import headlines
from headscope.results.result import Bound, Result
from headscope.results.table import results_table
from headscope.results.verdicts import judge, judge_by_parts, samples_needed
from headscope.runs.aggregation import wilson_interval

QUESTIONS = {
    question.name: question
    for question in (
        Question(
            name="x.loss",
            sentence="In {model}, the loss rises by {value}[ without {unit}][; the control is {control:.1f}]",
            answer="The loss rises by {values}",
            number="+.2f",
            value_unit="nats/token",
            samples="documents",
            level="headline",
            topic="X",
        ),
        Question(name="x.share", sentence="the share is {value}", number="percent", level="headline", topic="X"),
        Question(name="x.ratio", sentence="the ratio is {value}", samples="seeds", is_ratio=True, topic="X"),
        Question(name="x.correlation", sentence="r is {value}", samples="seeds", limits=(-1, 1), topic="X"),
        Question(name="x.optional", statement="it rises", sentence="the change is[ {value}]", topic="X"),
        Question(
            name="x.claim",
            statement="the loss of {model} rises",
            sentence="it rises by {value}",
            criterion="by more than {limit}",
            number="+.2f",
            samples="documents",
            topic="X",
        ),
        Question(name="x.heads", sentence="the median of {model} is {value}", samples="heads", topic="X"),
        Question(name="x.trials", sentence="{value} succeed", number="percent", samples="trials", topic="X"),
        Question(name="x.parts", statement="both hold", sentence="{parts}", topic="X"),
    )
}


@pytest.fixture(autouse=True)
def _questions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("words", "ranking", "table", "verdicts"):
        monkeypatch.setattr(f"headscope.results.{module}.questions", lambda: QUESTIONS)


def _loss(**changes: object) -> Result:
    values = {"question": "x.loss", "model": "base", "value": 0.45, "low": 0.4, "high": 0.5, "n": 60}
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_sentence_names_value_unit_interval_and_documents() -> None:
    text = "In base, the loss rises by +0.45 nats/token (95 % confidence interval +0.40 to +0.50, 60 documents)."
    assert words.sentence(_loss()) == text
    brief = "In base, the loss rises by +0.45 nats/token (+0.40 to +0.50, 60 documents) without L3H1"
    assert words.headline(_loss(layer=3, head=1)) == brief


def test_cell_of_a_table_has_the_interval_without_unit() -> None:
    assert words.cell(_loss()) == "+0.45 (+0.40 to +0.50)"
    assert words.cell(_loss(is_exact=False)) == "~+0.45"
    assert words.cell(_loss(low=0.45, high=0.45)) == "+0.45 (the same in all 60 documents)"


def test_sentence_says_that_an_interval_is_corrected_for_a_choice_and_the_headline_does_not() -> None:
    chosen = _loss(selected_from=20)
    assert words.sentence(chosen).endswith("interval +0.40 to +0.50, corrected for the choice among 20, 60 documents).")
    assert words.headline(chosen).endswith("(+0.40 to +0.50, 60 documents)")


def test_parts_in_brackets_are_left_out_without_a_value() -> None:
    assert "control" not in words.sentence(_loss(details={"control": math.nan}))
    assert words.sentence(_loss(details={"control": 0.25})).endswith("; the control is 0.2.")
    assert "L3 KV group 1" in words.sentence(_loss(layer=3, kv_group=1))


def test_place_without_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="limit"):
        words.criterion(Result(question="x.claim", model="base", value=1.0))


def test_estimate_has_a_mark_and_no_interval() -> None:
    estimate = _loss(is_exact=False)
    assert words.sentence(estimate) == "In base, the loss rises by +0.45 nats/token (an estimate, 60 documents)."
    assert words.headline(estimate).startswith("In base, the loss rises by ~+0.45 nats/token")


def test_one_document_gives_no_interval() -> None:
    text = words.sentence(_loss(low=math.nan, high=math.nan, n=1))
    assert text == "In base, the loss rises by +0.45 nats/token (1 document gives no interval)."


def test_answer_lists_up_to_four_models_and_else_the_extremes() -> None:
    results = [_loss(model=name, value=value) for name, value in (("a", 0.1), ("b", 0.2))]
    assert words.answer(results) == "The loss rises by +0.10 in a and +0.20 in b (nats/token)."
    many = [_loss(model=f"m{index}", value=index / 10) for index in (3, 1, 5, 2, 4)]
    assert words.answer(many) == "The loss rises by from +0.10 in m1 to +0.50 in m5 (nats/token)."


@pytest.mark.parametrize(
    ("low", "high", "side", "verdict"),
    [
        (0.4, 0.5, "above", "supported"),
        (0.4, 0.5, "below", "not supported"),
        (-0.5, -0.4, "above", "not supported"),
        (-0.1, 0.1, "above", "inconclusive"),
        (math.nan, math.nan, "above", "inconclusive"),
    ],
)
def test_verdict_needs_the_whole_interval_on_one_side(low: float, high: float, side: str, verdict: str) -> None:
    assert judge(_loss(low=low, high=high), Bound(side)).verdict == verdict  # type: ignore[arg-type]


def test_inconclusive_says_how_many_documents_would_decide() -> None:
    claim = Result(question="x.claim", model="base", value=0.1, low=-0.1, high=0.3, n=8, details={"limit": 0})
    undecided = judge(claim, Bound("above"))
    assert samples_needed(undecided) == 32, "half width 0.2 at distance 0.1: four times as many"
    assert_names(words.evidence(undecided), "-0.10 to +0.30", "8 documents", "32 documents")
    assert words.criterion(undecided) == "by more than 0"
    assert_names(words.sentence(undecided), words.evidence(undecided), "by more than 0")
    assert samples_needed(judge(_loss(is_exact=False, low=math.nan, high=math.nan), Bound("above"))) is None


@pytest.mark.parametrize(("share", "threshold", "trials"), [(0.7, 0.5, 10), (1.0, 0.9, 10), (0.3, 0.5, 10)])
def test_trials_needed_are_those_at_which_the_interval_of_wilson_leaves_the_threshold(
    share: float, threshold: float, trials: int
) -> None:
    low, high = wilson_interval(share, trials)
    claim = judge(Result(question="x.trials", value=share, low=low, high=high, n=trials), Bound("above", threshold))
    needed = samples_needed(claim)
    assert claim.verdict == "inconclusive"
    assert needed is not None

    def is_decided(count: int) -> bool:
        low, high = wilson_interval(share, count)
        return not low <= threshold <= high

    assert (is_decided(needed), is_decided(needed - 1)) == (True, False)
    assert_names(words.what_decides(claim), f"{needed} trials")


def test_asymmetric_interval_counts_the_half_that_faces_the_threshold() -> None:
    ratio = Result(question="x.loss", value=2.0, low=1.0, high=6.0, n=10)
    assert samples_needed(judge(ratio, Bound("above", 1.5))) == 40
    assert samples_needed(judge(ratio, Bound("below", 4.0))) == 40


@pytest.mark.parametrize(
    ("low", "high", "between", "outside"),
    [
        (-0.05, 0.05, "supported", "not supported"),
        (0.2, 0.3, "not supported", "supported"),
        (-0.3, -0.2, "not supported", "supported"),
        (0.05, 0.3, "inconclusive", "inconclusive"),
        (-0.2, 0.2, "inconclusive", "inconclusive"),
    ],
)
def test_verdicts_between_two_thresholds(low: float, high: float, between: str, outside: str) -> None:
    change = _loss(value=(low + high) / 2, low=low, high=high)
    assert judge(change, Bound("between", -0.1, 0.1)).verdict == between
    assert judge(change, Bound("outside", -0.1, 0.1)).verdict == outside


def _part(value: float, half_width: float, side: str = "above", **changes: object) -> Result:
    interval = {"value": value, "low": value - half_width, "high": value + half_width, "n": 10}
    return judge(_loss(**{**interval, **changes}), Bound(side))  # type: ignore[arg-type]


def test_all_undecided_parts_must_be_decided_unless_one_would_refute_the_claim() -> None:
    claim = Result(question="x.parts")
    agreeing = [_part(0.1, 0.2), _part(0.1, 0.3), _part(0.1, 0.05)]
    undecided = judge_by_parts(claim, agreeing)
    assert words.evidence(undecided).endswith(words.what_decides(undecided))
    assert_names(words.what_decides(undecided), "90 documents")  # the part that needs most
    undecided = judge_by_parts(claim, [*agreeing, _part(-0.1, 0.11)])
    correction = stats.t.ppf(1 - 0.025 / 4, 9) / stats.t.ppf(0.975, 9)
    needed = math.ceil(10 * (0.11 * correction / 0.1) ** 2)
    assert_names(words.what_decides(undecided), f"{needed} documents")  # one part that fails is enough
    assert [part.selected_from for part in undecided.parts] == [1, 1, 1, 4]
    assert not words.what_decides(judge_by_parts(claim, [_part(-0.1, 0.05), *agreeing]))


def test_more_documents_do_not_decide_a_claim_over_the_heads_of_one_model() -> None:
    claim = _part(0.1, 0.2, question="x.heads")
    text = words.what_decides(claim)
    assert_names(text, "documents", "seed", "40 heads")
    assert words.evidence(claim).endswith(text)
    assert words.evidence(judge_by_parts(Result(question="x.parts"), [claim])).endswith(text)


def test_other_reasons_say_what_would_decide() -> None:
    few = judge(_loss(low=math.nan, high=math.nan, n=2), Bound("above"))
    assert_names(words.what_decides(few), "3 documents")
    assert words.sentence(few).endswith(f"{words.what_decides(few)}.")
    assert words.what_decides(judge_by_parts(Result(question="x.parts"), [few, few])) == words.what_decides(few)
    lengths = {"context_length": 1024, "native_context": 8192, "half_context": 4096}
    short = judge(_loss(details=lengths), Bound("above"), "short")
    assert short.verdict == "inconclusive"
    assert_names(words.what_decides(short), "1,024", "8,192", "4,096")
    estimate = judge(_loss(is_exact=False), Bound("above"))
    assert estimate.verdict == "inconclusive", "an estimate decides nothing, whatever its interval"
    assert estimate.reason == "estimate"
    assert_names(words.what_decides(estimate), "exact")
    assert_names(words.what_decides(_part(0.0, 0.2)), "threshold")


def test_one_of_many_parts_refutes_a_claim_only_beyond_chance() -> None:
    """A part that contradicts the claim was chosen for that; the others are judged as they are."""
    supported, against = _part(0.1, 0.09), _part(-0.1, 0.09)
    assert judge_by_parts(Result(question="x.parts"), [against]).verdict == "not supported"
    many = judge_by_parts(Result(question="x.parts"), [against, *[supported] * 39])
    assert many.verdict == "inconclusive"
    assert [part.verdict for part in many.parts] == ["inconclusive", *["supported"] * 39]
    assert judge_by_parts(Result(question="x.parts"), [_part(-0.1, 0.02), *[supported] * 39]).verdict == "not supported"


def test_a_part_that_is_a_ratio_is_corrected_on_the_log_scale() -> None:
    ratio = _loss(question="x.ratio", value=0.5, low=0.5 * math.exp(-0.5), high=0.5 * math.exp(0.5), n=3)
    against = judge(ratio, Bound("above", 1.0))
    assert against.verdict == "not supported"
    claim = judge_by_parts(
        Result(question="x.parts"), [against, judge(_loss(value=2, low=1.9, high=2.1), Bound("above"))]
    )
    half = 0.5 * stats.t.ppf(1 - 0.025 / 2, 2) / stats.t.ppf(0.975, 2)
    assert claim.parts[0].low == pytest.approx(0.5 * math.exp(-half))
    assert claim.parts[0].high == pytest.approx(0.5 * math.exp(half))
    assert claim.verdict == "inconclusive"


def test_the_corrected_interval_of_a_correlation_ends_at_its_limits() -> None:
    against = judge(_loss(question="x.correlation", value=-0.8, low=-1.0, high=-0.2, n=3), Bound("above"))
    corrected = judge_by_parts(Result(question="x.parts"), [against, judge(_loss(), Bound("above"))]).parts[0]
    assert corrected.low == -1
    assert -0.2 < corrected.high <= 1


def test_a_claim_without_a_value_is_not_on_its_threshold() -> None:
    details = {"estimated": 1, "units": 5, "unit_nouns": "heads"}
    claim = Result(question="x.optional", model="base", n=8, details=details)
    text = words.what_decides(judge(claim, Bound("above"), "estimated"))
    assert_names(text, "1 of 5 heads")
    assert "threshold" not in text


def test_claim_of_parts_is_refuted_by_one_part() -> None:
    parts = [judge(_loss(), Bound("above")), judge(_loss(), Bound("below"))]
    assert judge_by_parts(_loss(), parts).verdict == "not supported"
    assert judge_by_parts(_loss(), parts[:1]).verdict == "supported"


def test_headlines_begin_with_the_surest_result_of_every_question() -> None:
    sure, unsure = _loss(model="sure"), _loss(model="unsure", low=0.0, high=0.9)
    share = Result(question="x.share", value=0.5)
    assert headlines([unsure, sure, share], 3) == [sure, share, unsure]
    assert len(headlines([_loss(n=count) for count in range(3, 23)])) == 8


def test_table_has_the_parts_of_a_result_and_a_stable_key() -> None:
    table = results_table([judge_by_parts(_loss(where={"b": 2, "a": "x"}), [_loss(model="part")])])
    assert [*table["model"]] == ["base", "part"]
    assert table["where"][0] == "a=x, b=2"
    assert _loss(layer=1, head=2).key == _loss(layer=3, head=4).key, "the answer is not part of the question"


def test_registry_names_every_question_once() -> None:
    names = [question.name for question in registry.questions().values()]
    assert len(names) == len({*names})
    assert all(question.topic for question in registry.questions().values())


def test_lists_of_heads_use_the_format_of_their_numbers_and_answers_follow_each_other() -> None:
    assert words.format_value({"L3H1": 0.45, "L5H2": 0.333}, "percent") == "L3H1 (45 %), L5H2 (33 %)"
    rises, shares = _loss(model="a", value=0.1), [_loss(model="b", value=0.2)]
    assert words.answers([rises, *shares]) == words.answer([rises, *shares])


def test_top_head_has_an_interval_for_the_choice_among_all_heads() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        index = pd.MultiIndex.from_product([range(5), range(8)], names=["layer", "head"])
        values = pd.DataFrame(rng.normal(size=(40, 8)), index)
        top = top_head_result("x.loss", values, model="base")
        covered += top.low <= 0 <= top.high
    assert covered >= 186, "0 is the mean of every head: at least 95 %, give or take two standard errors"
    assert (top.unit, top.selected_from, top.n) == (f"L{top.layer}H{top.head}", 40, 8)
    assert len(top.details["next"]) == 4
    assert min([top.value, *top.details["next"].values()]) >= values.mean(axis=1).nlargest(5).min() - 1e-12


def test_results_without_question_value_or_key_of_their_own_are_reported_and_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, missing = _loss(), Result(question="x.claim", model="base", value=1.0)
    results = [good, _loss(question="x.unknown"), missing, _loss(layer=1, head=1)]
    reported: list[str] = []
    probe = Probe()
    probe.name = "x"  # type: ignore[misc]
    monkeypatch.setattr(plugins, "call_parts", lambda part, run: [(probe, results)])
    monkeypatch.setattr(plugins, "report_broken", lambda error: reported.append(str(error)))
    assert collection._compute_results(None) == {"x": [good]}  # type: ignore[arg-type]
    for line, named in zip(reported, ("x.unknown", "limit", "x.loss, base"), strict=True):
        assert_names(line, "'x'", named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"details": {"n": 7}}, "detail 'n'"),
        ({"details": {"model": "yarn"}}, "detail 'model'"),
        ({"details": {"context_length": 7}, "where": {"context_length": 512}}, "detail 'context_length'"),
        ({"where": {"unit": "head"}}, "condition 'unit'"),
    ],
)
def test_details_and_conditions_named_like_another_place_are_refused(
    fields: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    probe, wrong = Probe(), [_loss(**fields)]
    probe.name = "x"  # type: ignore[misc]
    monkeypatch.setattr(plugins, "call_parts", lambda part, run: [(probe, wrong)])
    monkeypatch.setattr(plugins, "report_broken", lambda error: reported.append(str(error)))
    assert collection._compute_results(None) == {"x": []}  # type: ignore[arg-type]
    assert_names(reported[0], named, "'x.loss'")
