"""The paper's claims on synthetic runs that agree with them and on runs that contradict them."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from headscope.errors import BadInput
from headscope.rendering.run_results import claim_table
from headscope.rendering.run_results import claims as claims_among
from headscope.results import words
from headscope.results.collection import all_results
from headscope.results.result import Bound, Result
from headscope.runs.run import Run
from probes.adapt.paper_page import comparison_page
from probes.adapt.results import ComparedModels, results
from probes.influence.analysis import all_sweeps

LEARNED, YARN, BARE = "adarope:adapter=x", "yarn:factor=8", "yarn:factor=8,attention_factor=1"
PROBES = ("measure", "needle", "influence")
"""The probes whose tables the claims read."""

RunOf = Callable[..., Run]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """A synthetic run of these models, written once and opened anew for each test."""

    @cache
    def written(*models: str) -> Path:
        return synthetic_run(tmp_path_factory.mktemp("runs"), models=models, probes=PROBES).path

    return lambda *models: Run.open(written(*models))


def claims(run: Run) -> list[Result]:
    return claims_among(all_results(run))


def adaptation_claims(run: Run) -> dict[tuple[str, str], Result]:
    """The claims about adapters by name and model."""
    return {
        (result.question.removeprefix("adapt.claim."), result.model): result
        for result in results(run)
        if result.question.startswith("adapt.claim.")
    }


def test_compared_models_are_identified_by_their_schemes(run_of: RunOf) -> None:
    run = run_of("base", BARE, YARN, LEARNED)
    assert [*ComparedModels.find_in(run)] == [ComparedModels("base", YARN, BARE, LEARNED)]


@pytest.mark.slow
def test_every_adarope_model_is_compared_with_the_yarn_it_started_from(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED, "adarope:adapter=y", "yarn:factor=2")
    positions = run.positions
    is_other = positions["model"] == "yarn:factor=2"
    run._frames["positions"] = positions.assign(
        log_theta=positions["log_theta"].where(~is_other, positions["log_theta"] - 1)
    )
    assert [(models.adarope, models.yarn) for models in ComparedModels.find_in(run)] == [
        (LEARNED, YARN),
        ("adarope:adapter=y", YARN),
    ]
    claims = adaptation_claims(run)
    assert {claim.model for claim in claims.values()} == {LEARNED, "adarope:adapter=y", YARN}
    assert len({claim.key for claim in claims.values()}) == len([*results(run)]), "YaRN is judged once, not per adapter"
    run._frames["positions"] = run.positions.assign(log_theta_init=run.positions["log_theta_init"] - 1)
    assert [models.yarn for models in ComparedModels.find_in(run)] == ["yarn:factor=2"] * 2


@pytest.mark.slow
def test_a_run_without_an_adarope_model_has_no_adaptation_claims(run_of: RunOf) -> None:
    run = run_of("base", YARN)
    assert adaptation_claims(run) == {}
    assert {claim.question for claim in claims(run)} == {"retrieval.ablation_claim"}
    assert {claim.question for claim in claims(run_of("base", LEARNED))} > {"retrieval.ablation_claim"}


@pytest.mark.slow
@pytest.mark.parametrize(("order", "verdict"), [((LEARNED, YARN), "supported"), ((YARN, LEARNED), "not supported")])
def test_the_loss_is_compared_with_yarn_in_every_bin(order: tuple[str, str], verdict: str, run_of: RunOf) -> None:
    run = run_of("base", *order)  # each model's loss is 0.05 above the previous one's
    claim = adaptation_claims(run)["loss", LEARNED]
    bins = run.nll[run.nll["context_length"] == 1024]["position"].nunique()
    assert (claim.verdict, claim.baseline, len(claim.parts)) == (verdict, YARN, bins)
    difference = -0.05 if verdict == "supported" else 0.05
    assert [part.value for part in claim.parts] == pytest.approx([difference] * bins)
    assert [*claim.parts[0].by_sample.values()] == pytest.approx([difference] * len(claim.parts[0].by_sample), abs=1e-6)
    below = bins if verdict == "supported" else 0
    assert claim.details == {"bins": bins, "below": below, "certain": below}


@pytest.mark.slow
def test_claims_need_measurements_of_both_models(run_of: RunOf) -> None:
    """The AdaRoPE model may have only influence tables, or losses of other texts."""
    names = {name for name, _ in adaptation_claims(run_of("base", YARN, LEARNED))}
    assert {"loss", "lengths_yarn", "lengths_adarope"} <= names
    for label in (LEARNED, YARN):
        run = run_of("base", YARN, LEARNED)
        run._frames["attention"] = run.attention[run.attention["model"] != label]
        run._frames["nll"] = run.nll[run.nll["model"] != label]
        claims = adaptation_claims(run)
        assert ("loss", LEARNED) not in claims
        lengths = {key: claim for key, claim in claims.items() if key[0].startswith("lengths")}
        assert {*lengths} == ({("lengths_adarope", LEARNED)} if label == YARN else set())
        assert not any("nan" in words.evidence(claim) for claim in lengths.values())
    run = run_of("base", YARN, LEARNED)
    nll = run.nll.astype({"doc": "str"})
    run._frames["nll"] = nll.assign(doc=nll["doc"].where(nll["model"] != LEARNED, "another"))
    assert ("loss", LEARNED) not in adaptation_claims(run)


@pytest.mark.slow
def test_the_verdicts_follow_the_parameters(run_of: RunOf) -> None:
    """Synthetic parameters: tau from 1 to 1.05, gamma from 0 up, frequency change grows with the pair."""
    run, names = run_of("base", YARN, LEARNED), ("tau", "gamma")
    claims = adaptation_claims(run)
    assert [claims[name, LEARNED].verdict for name in names] == ["supported"] * 2
    slow_pairs = claims["slow_pairs", LEARNED]
    assert (slow_pairs.value > 2 / 3, slow_pairs.verdict, slow_pairs.reason) == (True, "inconclusive", "few_units")
    assert claims["tau", LEARNED].bound == Bound("below", 0.1)
    assert claims["lengths_adarope", LEARNED].verdict == "not supported"
    assert [part.bound.threshold for part in claims["lengths_adarope", LEARNED].parts if part.bound] == pytest.approx(
        [1 / 1.105, 1.105], abs=1e-3
    )
    changed_run = Run(run.path, run.manifest)
    positions, scales = run.positions, run.scales
    changed_run._frames["scales"] = scales.assign(tau=2 * scales["tau"], gamma=-scales["gamma"])
    changed_run._frames["positions"] = positions.assign(
        log_theta=positions["log_theta_init"] + (positions["pair"] == 0)
    )
    opposite = adaptation_claims(changed_run)
    assert [opposite[name, LEARNED].verdict for name in names] == ["not supported"] * 2


def test_unchanged_parameters_are_described_without_a_share(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    run._frames["positions"] = run.positions.assign(log_theta=run.positions["log_theta_init"])
    claim = adaptation_claims(run)["slow_pairs", LEARNED]
    assert claim.verdict == "inconclusive"
    assert "nan" not in words.sentence(claim)


def test_a_claim_whose_interval_includes_the_threshold_is_inconclusive(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    scales = run.scales
    is_positive = (scales["layer"] * 4 + scales["head"]) % 3 != 0  # two thirds of the heads
    run._frames["scales"] = scales.assign(gamma=is_positive.map({True: 0.1, False: -0.1}))
    claim = adaptation_claims(run)["gamma", LEARNED]
    assert claim.verdict == "inconclusive"
    assert claim.bound == Bound("above", 0.6)
    assert claim.low < 0.6 < claim.high
    assert (claim.n, claim.reason) == (len(scales[scales["model"] == LEARNED]), "")


def test_two_documents_decide_no_claim_about_losses(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    run._frames["nll"] = run.nll[run.nll["doc"].isin(["synthetic/0", "synthetic/1"])]
    claim = adaptation_claims(run)["loss", LEARNED]
    assert claim.verdict == "inconclusive"
    assert {(part.n, part.reason) for part in claim.parts} == {(2, "few")}
    assert_names(words.evidence(claim), "2 documents", "3 documents")


def test_claims_about_long_context_are_judged_beyond_half_of_the_native_context(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    for model in run.manifest["models"]:
        model["geometry"] = {**model["geometry"], "native_context": 8192}
    claims = [claim for claim in adaptation_claims(run).values() if "context_length" in claim.where]
    assert len(claims) >= 3
    assert {claim.verdict for claim in claims} == {"inconclusive"}
    assert {(part.verdict, part.reason) for claim in claims for part in claim.parts} == {("inconclusive", "short")}
    for claim in claims:
        assert_names(words.evidence(claim), "1,024", "8,192", "4,096")


def test_the_start_of_a_training_is_needed_for_the_claim_about_evenness(run_of: RunOf) -> None:
    claim = adaptation_claims(run_of("base", LEARNED))["evenness", LEARNED]
    assert (claim.verdict, claim.reason) == ("inconclusive", "start")


@pytest.mark.slow
def test_the_comparison_page_has_every_claim_and_every_position_bin(run_of: RunOf) -> None:
    run = run_of("base", LEARNED, YARN)
    text = comparison_page(run)
    assert {claim.key for claim in adaptation_claims(run).values()} < {claim.key for claim in claims(run)}, (
        "the page includes claims about influence"
    )
    table = claim_table(claims(run))
    assert table is not None
    assert any(claim.criterion for claim in table.claims)
    for claim in table.claims:
        assert f"| {claim.statement} | **{claim.verdict}** | {claim.evidence} | {claim.criterion} |" in text
    positions = run.nll[run.nll["context_length"] == 1024]["position"].unique()
    assert len(positions) > 1
    for position in positions:
        assert f"\n| {position:,} " in text
    assert "synthetic/0" in text


def reset_claims(run: Run, **effects_by_table: pd.Series) -> dict[tuple[str, str], Result]:
    """The claims about resets of the AdaRoPE model, with other effects in the named tables, by question and change."""
    changed_run = Run(run.path, run.manifest)
    for name, effects in effects_by_table.items():
        changed_run._frames[name] = run.table(name).assign(delta_nll=effects)
    return {
        (claim.question, str(claim.where["intervention"])): claim
        for claim in claims(changed_run)
        if claim.where.get("target") == "init"
    }


@pytest.mark.slow
def test_influence_claims_depend_on_concentration_top_head_and_sum(run_of: RunOf) -> None:
    run = run_of("base", LEARNED)
    heavy_tail, top_head = ("influence.heavy_tail", "scale"), ("influence.tail_head", "scale")
    small_effects = ("influence.small_parts", "joint")
    single, joint = run.influence["delta_nll"], run.influence_sets["delta_nll"]
    claims = reset_claims(run)
    assert len(claims) == 7
    assert [claims[key].verdict for key in (heavy_tail, top_head, small_effects)] == [
        "supported",
        "supported",
        "not supported",
    ]
    of_head = claims[top_head]
    assert [of_head.details[name] for name in ("rank", "units", "top", "group_of")] == [1, 24, 2, ""]
    of_group = claims["influence.tail_head", "joint"]
    assert (of_group.model, of_group.unit, of_group.where["statistic"]) == (LEARNED, "L0H0", "retrieval")
    assert of_group.details["group_of"]
    rows = run.influence_sets.query("model == @LEARNED and component == 'joint' and choice == 'top' and size == 8")
    (joint_effects,) = (one for one in all_sweeps(run) if (one.model, one.key["intervention"]) == (LEARNED, "joint"))
    sizes = claims[small_effects].details
    assert sizes["largest"] == pytest.approx(joint_effects.units["effect"].max())
    assert sizes["all_units"] == pytest.approx(rows["delta_nll"].mean())
    assert (sizes["units"], sizes["noun"]) == (8, "KV group")
    opposite = reset_claims(run, influence=-single, influence_sets=10 * joint)
    assert [opposite[key].verdict for key in (heavy_tail, top_head, small_effects)] == [
        "inconclusive",
        "not supported",
        "supported",
    ]
    assert (opposite[top_head].details["rank"], opposite[top_head].details["units"]) == (24, 24)
    assert reset_claims(run, influence=single * 0 + 0.01)[heavy_tail].verdict == "not supported"
    assert reset_claims(run, influence=single.where(single > 0.045, 0.0))[heavy_tail].verdict == "supported"


def test_the_validation_loss_of_a_training_is_paired_by_document(run_of: RunOf) -> None:
    losses = {(step, doc): 3.0 + 0.1 * doc - 0.01 * step for step in (0, 10, 20) for doc in range(4)}
    losses |= {(10, doc): 2.5 for doc in range(4)}
    rows = [{"step": step, "doc": f"d{doc}", "nll": loss} for (step, doc), loss in losses.items()]
    run = run_of("base")
    run._frames["validation"] = pd.DataFrame(rows).assign(adapter="long", tokens=100)
    run.tables = [*run.tables, "validation"]
    (result,) = (result for result in results(run) if result.question == "adapt.validation_loss")
    assert (result.value, result.low, result.high, result.n) == pytest.approx((-0.2, -0.2, -0.2, 4))
    assert result.where == {"training": "long"}
    assert result.details == pytest.approx({"step": 20, "start": 3.15, "last": 2.95, "best_step": 10, "best": 2.5})


def test_evenness_is_compared_with_the_start_of_the_training(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    heads = run.heads.assign(cov=run.heads["model"].map({"base": 2.37, YARN: 1.75, LEARNED: 1.87}).astype(float))
    run.__dict__["heads"] = heads
    claim = adaptation_claims(run)["evenness", LEARNED]
    assert (claim.verdict, claim.baseline) == ("not supported", YARN)
    assert claim.value == pytest.approx(1.87 / 1.75)
    assert claim.details["medians"] == pytest.approx({"base": 2.37, YARN: 1.75, LEARNED: 1.87})


def test_a_further_run_judges_the_claims_that_the_page_leaves_open(
    run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run_of("base", LEARNED, YARN), run_of("base", LEARNED)
    where = {"context_length": 1024}
    open_claim, decided, other = (
        Result(question=f"influence.{name}", model="adarope:adapter=x", where=where, verdict=verdict, value=0.1, n=2)
        for name, verdict in (
            ("heavy_tail", "inconclusive"),
            ("small_parts", "supported"),
            ("tail_head", "inconclusive"),
        )
    )
    claims = {
        first: [open_claim, decided, other],
        second: [replace(open_claim, verdict="supported"), replace(decided, verdict="not supported")],
    }
    monkeypatch.setattr("probes.adapt.paper_page.all_results", lambda run: run)
    monkeypatch.setattr("probes.adapt.paper_page.run_claims", lambda run: claims.get(run, []))
    for name in ("statement", "evidence", "criterion", "what_decides"):
        monkeypatch.setattr(words, name, lambda claim: claim.question)
    text = comparison_page(first, second)
    assert "| influence.heavy_tail | **supported** |" in text
    assert "| influence.small_parts | **supported** |" in text
    assert "| influence.tail_head | **inconclusive** |" in text
    assert f"judged by another run, `{second.name}`" in text
    listed = [line for line in text.splitlines() if line.startswith("- influence")]
    assert listed == ["- influence.heavy_tail"]


def test_a_further_run_of_another_model_is_refused(run_of: RunOf) -> None:
    first, second = run_of("base", LEARNED, YARN), run_of("base", "adarope:adapter=y")
    with refuses(BadInput, second.name, "adarope:adapter=y"):
        comparison_page(first, second)
