"""The paper's claims are judged by the run's own figures: a run made to hold them, and one made not to."""

from pathlib import Path

import pandas as pd
import pytest

from headscope.report.assembly import findings_by_topic
from headscope.report.blocks import PaperClaim
from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_run
from probes.adapt.claims import ComparedModels, adaptation_claims
from probes.adapt.paper_page import collect_claims, comparison_page
from probes.influence.analysis import shown

LEARNED, YARN, BARE = "adarope:adapter=x", "yarn:factor=8", "yarn:factor=8,attention_factor=1"


def test_who_plays_which_part_is_told_by_the_schemes(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", BARE, YARN, LEARNED))
    assert [*ComparedModels.find_in(run)] == [ComparedModels("base", YARN, BARE, LEARNED)]


def test_every_learned_model_is_judged_beside_the_yarn_that_it_started_from(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", YARN, LEARNED, "adarope:adapter=y", "yarn:factor=2"))
    positions = run.positions
    other = positions["model"] == "yarn:factor=2"
    run._frames["positions"] = positions.assign(
        log_theta=positions["log_theta"].where(~other, positions["log_theta"] - 1)
    )
    assert [(cast.adarope, cast.yarn) for cast in ComparedModels.find_in(run)] == [(LEARNED, YARN), ("adarope:adapter=y", YARN)]
    judged = list(adaptation_claims(run))
    assert {claim.model for claim in judged} == {LEARNED, "adarope:adapter=y"}
    assert all(claim.evidence.startswith(f"{claim.model}: ") for claim in judged)
    run._frames["positions"] = run.positions.assign(log_theta_init=run.positions["log_theta_init"] - 1)
    assert [cast.yarn for cast in ComparedModels.find_in(run)] == ["yarn:factor=2"] * 2


def test_a_run_without_a_learned_model_is_not_judged(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path / "a", models=("base", YARN))
    assert [*adaptation_claims(run)] == []
    told = [finding.text for finding in findings_by_topic(run)["Comparison with the paper"]]
    assert all("(Wu et al. 2024)" in text for text in told), "what is said of heads that retrieve needs nothing learned"
    learned = findings_by_topic(synthetic_run(tmp_path / "b", models=("base", LEARNED)))["Comparison with the paper"]
    assert not all("(Wu et al. 2024)" in finding.text for finding in learned)


@pytest.mark.parametrize(("order", "verdict"), [((LEARNED, YARN), "holds"), ((YARN, LEARNED), "differs")])
def test_the_loss_is_judged_against_yarn_in_every_bin(order: tuple[str, str], verdict: str, tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", *order))  # each model's loss is 0.05 above that of the one before
    first = next(adaptation_claims(run))
    assert "better than YaRN" in first.statement
    assert first.verdict == verdict
    bins = run.nll[run.nll["context_length"] == 1024]["position"].nunique()
    below = bins if verdict == "holds" else 0
    assert f"below YaRN's in {below} of {bins} bins" in first.evidence
    assert f"{-0.05 if below else 0.05:+.3f} nats/token" in first.evidence


def test_nothing_is_said_of_what_was_not_measured_of_both(tmp_path: Path) -> None:
    """As where the learned model is here for its influence alone, or read other texts."""
    said = {claim.statement for claim in adaptation_claims(synthetic_run(tmp_path, models=("base", YARN, LEARNED)))}
    lengths = {text for text in said if "ESS" in text or "does not extend" in text}
    loss = {text for text in said if "better than YaRN" in text}
    assert lengths
    assert loss
    for label in (LEARNED, YARN):
        run = synthetic_run(tmp_path / label, models=("base", YARN, LEARNED))
        run._frames["attention"] = run.attention[run.attention["model"] != label]
        run._frames["nll"] = run.nll[run.nll["model"] != label]
        found = {claim.statement: claim for claim in adaptation_claims(run)}
        assert not found.keys() & loss
        assert bool(found.keys() & lengths) == (label == YARN)
        assert not any("nan" in found[said].evidence for said in found.keys() & lengths)
    run = synthetic_run(tmp_path / "texts", models=("base", YARN, LEARNED))
    nll = run.nll.astype({"doc": "str"})
    run._frames["nll"] = nll.assign(doc=nll["doc"].where(nll["model"] != LEARNED, "another"))
    assert not {claim.statement for claim in adaptation_claims(run)} & loss


def test_the_verdicts_follow_the_parameters(tmp_path: Path) -> None:
    """Synthetic parameters: tau from 1 to 1.05, gamma from 0 up, change of frequency grows with the pair."""
    run = synthetic_run(tmp_path, models=("base", YARN, LEARNED))
    verdicts = {claim.statement: claim.verdict for claim in adaptation_claims(run)}
    about = (
        "tau concentrates near 1 with a mild right tail",
        "gamma is mostly positive",
        "Frequencies change mostly in the low-frequency pairs",
    )
    assert [verdicts[said] for said in about] == ["holds"] * 3
    other = Run(run.path, run.manifest)
    positions, scales = run.positions, run.scales
    other._frames["scales"] = scales.assign(tau=2 * scales["tau"], gamma=-scales["gamma"])
    other._frames["positions"] = positions.assign(log_theta=positions["log_theta_init"] + (positions["pair"] == 0))
    turned = {claim.statement: claim.verdict for claim in adaptation_claims(other)}
    assert [turned[said] for said in about] == ["differs"] * 3
    assert verdicts["AdaRoPE keeps small-ESS heads near the diagonal and pushes large ones above it"] == "differs"


def test_the_page_tells_every_claim_and_every_bin_of_position(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", LEARNED, YARN))
    text, judged = comparison_page(run), collect_claims(run)
    assert {claim.statement for claim in adaptation_claims(run)} < {claim.statement for claim in judged}, (
        "influence is judged, too"
    )
    assert all(f"| {claim.statement} | **{claim.verdict}** | {claim.evidence} |" in text for claim in judged)
    positions = run.nll[run.nll["context_length"] == 1024]["position"].unique()
    assert len(positions) > 1
    for position in positions:
        assert f"\n| {position:,} " in text
    assert "synthetic/0" in text


def resets(run: Run, **changed: pd.Series) -> dict[str, PaperClaim]:
    """What is said of the learned model's resets, with other effects in these tables."""
    other = Run(run.path, run.manifest)
    for name, effects in changed.items():
        other._frames[name] = run.table(name).assign(delta_nll=effects)
    prefix = "Resetting the "
    return {
        claim.statement.removeprefix(prefix): claim
        for claim in collect_claims(other)
        if claim.statement.startswith(prefix)
    }


def test_influence_is_judged_by_its_spread_its_top_and_its_sum(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", LEARNED))
    spread = "temperature of one head at a time: most matter little, a small set forms a heavy tail"
    tail = "temperature of one head at a time: the top retrieval head lies in the tail"
    sums = (
        "frequencies and temperature of one head at a time: even the largest loss is modest against that of resetting"
    )
    single, joint = run.influence["delta_nll"], run.influence_sets["delta_nll"]
    found = resets(run)
    assert len(found) == 7
    assert [found[said].verdict for said in (spread, tail, f"{sums} all")] == ["holds in part", "holds", "differs"]
    assert "has rank 1 of 24" in found[tail].evidence
    rows = run.influence_sets.query("model == @LEARNED and component == 'joint' and choice == 'top' and size == 8")
    largest = shown(run.influence).query("model == @LEARNED and component == 'joint'")["delta"].max()
    assert f"{largest:+.2g} nats/token against {rows['delta_nll'].mean():+.2g}" in found[f"{sums} all"].evidence
    turned = resets(run, influence=-single, influence_sets=10 * joint)
    assert [turned[said].verdict for said in (spread, tail, f"{sums} all")] == ["holds in part", "differs", "holds"]
    assert "has rank 24 of 24" in turned[tail].evidence
    assert resets(run, influence=single * 0 + 0.01)[spread].verdict == "differs"
    assert resets(run, influence=single.where(single > 0.045, 0.0))[spread].verdict == "holds"


def test_evenness_is_judged_by_where_learning_started(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", YARN, LEARNED))
    wide = run.heads.assign(cov=run.heads["model"].map({"base": 2.37, YARN: 1.75, LEARNED: 1.87}).astype(float))
    run.__dict__["heads"] = wide
    (claim,) = [claim for claim in adaptation_claims(run) if "more evenly" in claim.statement]
    assert claim.verdict == "differs"
    assert f"learning started from {YARN}" in claim.evidence
