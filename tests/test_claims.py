"""The paper's claims are judged by the run's own figures: a run made to hold them, and one made not to."""

from pathlib import Path

import pytest

from headscope.report.outline import findings
from headscope.runs.synthetic import synthetic_run
from headscope.sections.adapt.claims import Cast, claims
from headscope.sections.adapt.paper import every_claim, page
from probes.influence.found import shown

LEARNED, YARN, BARE = "adarope:adapter=x", "yarn:factor=8", "yarn:factor=8,attention_factor=1"


def test_who_plays_which_part_is_told_by_the_schemes(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", BARE, YARN, LEARNED))
    assert Cast.of(run) == Cast("base", YARN, BARE, LEARNED)


def test_a_run_without_a_learned_model_is_not_judged(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", YARN))
    assert [*claims(run)] == []
    assert "Against the paper" not in findings(run)


@pytest.mark.parametrize(("order", "verdict"), [((LEARNED, YARN), "holds"), ((YARN, LEARNED), "differs")])
def test_the_loss_is_judged_against_yarn_in_every_bin(order: tuple[str, str], verdict: str, tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", *order))  # each model's loss is 0.05 above that of the one before
    first = next(claims(run))
    assert "better than YaRN" in first.said
    assert first.verdict == verdict
    bins = run.nll[run.nll["context_length"] == 1024]["position"].nunique()
    below = bins if verdict == "holds" else 0
    assert f"below YaRN's in {below} of {bins} bins" in first.found
    assert f"{-0.05 if below else 0.05:+.3f} nats/token" in first.found


def test_the_verdicts_follow_the_parameters(tmp_path: Path) -> None:
    """Synthetic parameters: tau from 1 to 1.05, gamma from 0 up, change of frequency grows with the pair."""
    run = synthetic_run(tmp_path, models=("base", YARN, LEARNED))
    verdicts = {claim.said: claim.verdict for claim in claims(run)}
    assert verdicts["tau concentrates near 1 with a mild right tail"] == "holds"
    assert verdicts["gamma is mostly positive"] == "holds"
    assert verdicts["Frequencies change mostly in the low-frequency pairs"] == "holds"
    assert verdicts["AdaRoPE keeps small-ESS heads near the diagonal and pushes large ones above it"] == "differs"


def test_the_page_tells_every_claim_and_every_bin_of_position(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", LEARNED, YARN))
    text = page(run)
    assert all(f"| {claim.said} | **{claim.verdict}** | {claim.found} |" in text for claim in every_claim(run))
    for position in run.nll[run.nll["context_length"] == 1024]["position"].unique():
        assert f"\n| {position:,} " in text
    assert "synthetic/0" in text


def test_influence_is_judged_by_its_spread_its_top_and_its_sum(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", LEARNED))
    judged = {claim.said: claim for claim in every_claim(run) if claim.said.startswith("Resetting")}
    assert len(judged) == 7
    top = shown(run.influence).query("model == @LEARNED and component == 'freq'").sort_values("delta").iloc[-1]
    tail = judged["Resetting the frequencies of one head at a time: the top retrieval head lies in the tail"]
    scores = run.heads[run.heads["model"] == LEARNED].set_index(["layer", "kv_group"])["retrieval"]
    assert (scores.idxmax() == (top["layer"], top["kv_group"])) == ("has rank 1 of 8" in tail.found)
    (whole,) = [claim for said, claim in judged.items() if "against that of resetting all" in said]
    joint = run.influence_sets.query("model == @LEARNED and component == 'joint' and choice == 'top'")
    everything = joint[joint["size"] == joint["size"].max()]["delta_nll"].mean()
    largest = shown(run.influence).query("model == @LEARNED and component == 'joint'")["delta"].max()
    assert whole.verdict == ("holds" if largest < everything / 4 else "differs")
