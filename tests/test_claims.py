"""The paper's claims are judged by the run's own figures: a run made to hold them, and one made not to."""

from pathlib import Path

import pytest

from headscope.claims import Cast, claims, page
from headscope.findings import sentences
from headscope.synthetic import synthetic_run

LEARNED, YARN, BARE = "adarope:adapter=x", "yarn:factor=8", "yarn:factor=8,attention_factor=1"


def test_who_plays_which_part_is_told_by_the_schemes(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", BARE, YARN, LEARNED))
    assert Cast.of(run) == Cast("base", YARN, BARE, LEARNED)


def test_a_run_without_a_learned_model_is_not_judged(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", YARN))
    assert claims(run) == []
    assert "Against the paper" not in sentences(run)


@pytest.mark.parametrize(("order", "verdict"), [((LEARNED, YARN), "holds"), ((YARN, LEARNED), "differs")])
def test_the_loss_is_judged_against_yarn_in_every_bin(order: tuple[str, str], verdict: str, tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("base", *order))  # each model's loss is 0.05 above that of the one before
    first = claims(run)[0]
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
    assert all(f"| {claim.said} | **{claim.verdict}** | {claim.found} |" in text for claim in claims(run))
    for position in run.nll[run.nll["context_length"] == 1024]["position"].unique():
        assert f"\n| {position:,} " in text
    assert "synthetic/0" in text
