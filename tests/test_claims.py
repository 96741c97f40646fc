"""The paper's claims on synthetic runs that agree with them and on runs that contradict them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from headscope.report.assembly import results_by_topic
from headscope.report.blocks import PaperClaim
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.adapt.claims import ComparedModels, adaptation_claims
from probes.adapt.paper_page import collect_claims, comparison_page
from probes.influence.analysis import best_unit_effects

LEARNED, YARN, BARE = "adarope:adapter=x", "yarn:factor=8", "yarn:factor=8,attention_factor=1"
PROBES = ("positions", "measure", "needle", "influence", "adapt")
"""The probes whose tables the claims read."""

RunOf = Callable[..., Run]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """A synthetic run of these models, written once and opened anew for each test."""

    @cache
    def written(*models: str) -> Path:
        return synthetic_run(tmp_path_factory.mktemp("runs"), models=models, probes=PROBES).path

    return lambda *models: Run.open(written(*models))


def test_compared_models_are_identified_by_their_schemes(run_of: RunOf) -> None:
    run = run_of("base", BARE, YARN, LEARNED)
    assert [*ComparedModels.find_in(run)] == [ComparedModels("base", YARN, BARE, LEARNED)]


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
    claims = list(adaptation_claims(run))
    assert {claim.model for claim in claims} == {LEARNED, "adarope:adapter=y"}
    assert all(f"{claim.model}: " in claim.evidence for claim in claims)
    run._frames["positions"] = run.positions.assign(log_theta_init=run.positions["log_theta_init"] - 1)
    assert [models.yarn for models in ComparedModels.find_in(run)] == ["yarn:factor=2"] * 2


def test_a_run_without_an_adarope_model_has_no_adaptation_claims(run_of: RunOf) -> None:
    run = run_of("base", YARN)
    assert [*adaptation_claims(run)] == []
    texts = [sentence(result) for result in results_by_topic(run)["Comparison with the paper"]]
    assert all("(Wu et al. 2024)" in text for text in texts), (
        "without an AdaRoPE model, all claims are about retrieval heads"
    )
    trained = results_by_topic(run_of("base", LEARNED))["Comparison with the paper"]
    assert not all("(Wu et al. 2024)" in sentence(result) for result in trained)


@pytest.mark.parametrize(("order", "verdict"), [((LEARNED, YARN), "supported"), ((YARN, LEARNED), "not supported")])
def test_the_loss_is_compared_with_yarn_in_every_bin(order: tuple[str, str], verdict: str, run_of: RunOf) -> None:
    run = run_of("base", *order)  # each model's loss is 0.05 above the previous one's
    claim = next(adaptation_claims(run))
    assert "lower loss than YaRN" in claim.statement
    assert claim.verdict == verdict
    bins = run.nll[run.nll["context_length"] == 1024]["position"].nunique()
    below = bins if verdict == "supported" else 0
    assert f"below YaRN's in {below} of {bins} position bins" in claim.evidence
    assert f"{-0.05 if below else 0.05:+.3f} nats/token" in claim.evidence


def test_claims_need_measurements_of_both_models(run_of: RunOf) -> None:
    """The AdaRoPE model may have only influence tables, or losses of other texts."""
    statements = {claim.statement for claim in adaptation_claims(run_of("base", YARN, LEARNED))}
    lengths = {text for text in statements if "ESS" in text or "does not extend" in text}
    loss = {text for text in statements if "lower loss than YaRN" in text}
    assert lengths
    assert loss
    for label in (LEARNED, YARN):
        run = run_of("base", YARN, LEARNED)
        run._frames["attention"] = run.attention[run.attention["model"] != label]
        run._frames["nll"] = run.nll[run.nll["model"] != label]
        claims = {claim.statement: claim for claim in adaptation_claims(run)}
        assert not claims.keys() & loss
        assert bool(claims.keys() & lengths) == (label == YARN)
        assert not any("nan" in claims[statement].evidence for statement in claims.keys() & lengths)
    run = run_of("base", YARN, LEARNED)
    nll = run.nll.astype({"doc": "str"})
    run._frames["nll"] = nll.assign(doc=nll["doc"].where(nll["model"] != LEARNED, "another"))
    assert not {claim.statement for claim in adaptation_claims(run)} & loss


def test_the_verdicts_follow_the_parameters(run_of: RunOf) -> None:
    """Synthetic parameters: tau from 1 to 1.05, gamma from 0 up, frequency change grows with the pair."""
    run = run_of("base", YARN, LEARNED)
    verdicts = {claim.statement: claim.verdict for claim in adaptation_claims(run)}
    statements = (
        "The median tau is near 1 (the paper also reports a mild right tail, which is not tested)",
        "gamma is mostly positive",
        "Frequencies change mostly in the low-frequency pairs",
    )
    assert [verdicts[statement] for statement in statements] == ["supported"] * 3
    changed_run = Run(run.path, run.manifest)
    positions, scales = run.positions, run.scales
    changed_run._frames["scales"] = scales.assign(tau=2 * scales["tau"], gamma=-scales["gamma"])
    changed_run._frames["positions"] = positions.assign(
        log_theta=positions["log_theta_init"] + (positions["pair"] == 0)
    )
    evidence = {claim.statement: claim.evidence for claim in adaptation_claims(run)}
    assert evidence[statements[0]].endswith("Our criterion: a distance below 0.1")
    assert all("Our criterion: longer is" in text for statement, text in evidence.items() if "small-ESS" in statement)
    opposite = {claim.statement: claim.verdict for claim in adaptation_claims(changed_run)}
    assert [opposite[statement] for statement in statements] == ["not supported"] * 3
    assert verdicts["AdaRoPE keeps small-ESS heads as they are and lengthens large-ESS heads"] == "not supported"


def test_a_claim_whose_interval_includes_the_threshold_is_inconclusive(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    scales = run.scales
    is_positive = (scales["layer"] * 4 + scales["head"]) % 3 != 0  # two thirds of the heads
    run._frames["scales"] = scales.assign(gamma=is_positive.map({True: 0.1, False: -0.1}))
    (claim,) = [claim for claim in adaptation_claims(run) if claim.statement == "gamma is mostly positive"]
    assert claim.verdict == "inconclusive"
    assert "Our criterion: more than 60 %" in claim.evidence


def test_two_documents_decide_no_claim_about_losses(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    run._frames["nll"] = run.nll[run.nll["doc"].isin(["synthetic/0", "synthetic/1"])]
    claim = next(adaptation_claims(run))
    assert claim.verdict == "inconclusive"
    assert "too few documents for intervals" in claim.evidence


def test_claims_about_long_context_are_judged_beyond_half_of_the_native_context(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    for model in run.manifest["models"]:
        model["geometry"] = {**model["geometry"], "native_context": 8192}
    reason = "1,024 tokens are not beyond half of the native context of 8,192"
    claims = [claim for claim in adaptation_claims(run) if reason in claim.evidence]
    assert len(claims) >= 3
    assert {claim.verdict for claim in claims} == {"inconclusive"}


def test_the_comparison_page_has_every_claim_and_every_position_bin(run_of: RunOf) -> None:
    run = run_of("base", LEARNED, YARN)
    text, claims = comparison_page(run), collect_claims(run)
    assert {claim.statement for claim in adaptation_claims(run)} < {claim.statement for claim in claims}, (
        "the page includes claims about influence"
    )
    assert all(f"| {claim.statement} | **{claim.verdict}** | {claim.evidence} |" in text for claim in claims)
    positions = run.nll[run.nll["context_length"] == 1024]["position"].unique()
    assert len(positions) > 1
    for position in positions:
        assert f"\n| {position:,} " in text
    assert "synthetic/0" in text


def reset_claims(run: Run, **effects_by_table: pd.Series) -> dict[str, PaperClaim]:
    """The claims about resets of the AdaRoPE model, with other effects in the named tables, by shortened statement."""
    changed_run = Run(run.path, run.manifest)
    for name, effects in effects_by_table.items():
        changed_run._frames[name] = run.table(name).assign(delta_nll=effects)
    prefix = "Resetting the "
    return {
        claim.statement.removeprefix(prefix): claim
        for claim in collect_claims(changed_run)
        if claim.statement.startswith(prefix)
    }


def test_influence_claims_depend_on_concentration_top_head_and_sum(run_of: RunOf) -> None:
    run = run_of("base", LEARNED)
    of_heads = "temperature of one head at a time to the start of training"
    heavy_tail = f"{of_heads}: a few heads account for most of the influence"
    top_head = f"{of_heads}: the top retrieval head is among the 5 % of heads with the largest influence (2 of 24)"
    small_effects = (
        "frequencies and temperature of one KV group at a time to the start of training: the largest effect of one KV "
        "group is small compared with resetting all of them"
    )
    single, joint = run.influence["delta_nll"], run.influence_sets["delta_nll"]
    claims = reset_claims(run)
    assert len(claims) == 7
    assert [claims[statement].verdict for statement in (heavy_tail, top_head, small_effects)] == [
        "supported",
        "supported",
        "not supported",
    ]
    assert "has rank 1 of 24" in claims[top_head].evidence
    (of_group,) = [claim for name, claim in claims.items() if "the KV group of the top" in name and "temp" in name]
    assert f"{LEARNED}: the KV group of layer 0, head 0 (retrieval score" in of_group.evidence
    rows = run.influence_sets.query("model == @LEARNED and component == 'joint' and choice == 'top' and size == 8")
    largest = best_unit_effects(run.influence).query("model == @LEARNED and component == 'joint'")["delta"].max()
    assert f"{largest:+#.2g} nats/token for one KV group (95 %" in claims[small_effects].evidence
    assert f"{rows['delta_nll'].mean():+#.2g} for all 8 (95 %" in claims[small_effects].evidence
    opposite = reset_claims(run, influence=-single, influence_sets=10 * joint)
    assert [opposite[statement].verdict for statement in (heavy_tail, top_head, small_effects)] == [
        "inconclusive",
        "not supported",
        "supported",
    ]
    assert "has rank 24 of 24" in opposite[top_head].evidence
    assert reset_claims(run, influence=single * 0 + 0.01)[heavy_tail].verdict == "not supported"
    assert reset_claims(run, influence=single.where(single > 0.045, 0.0))[heavy_tail].verdict == "supported"


def test_evenness_is_compared_with_the_start_of_the_training(run_of: RunOf) -> None:
    run = run_of("base", YARN, LEARNED)
    heads = run.heads.assign(cov=run.heads["model"].map({"base": 2.37, YARN: 1.75, LEARNED: 1.87}).astype(float))
    run.__dict__["heads"] = heads
    (claim,) = [claim for claim in adaptation_claims(run) if "more evenly" in claim.statement]
    assert claim.verdict == "not supported"
    assert f"training started from {YARN}" in claim.evidence
