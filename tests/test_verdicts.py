"""A verdict needs an interval on one side of the threshold; everything else is inconclusive."""

import math

import pandas as pd
import pytest
from support.synthetic_runs import synthetic_run

from headscope.results.effects.statistics import top_share_interval, top_unit_count
from headscope.run import Run
from headscope.runs.aggregation import verdict_above, verdict_of_parts


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.6, 0.9, "supported"),
        (0.1, 0.4, "not supported"),
        (0.4, 0.6, "inconclusive"),
        (0.5, 0.9, "inconclusive"),
        (0.1, 0.5, "inconclusive"),
        (math.nan, math.nan, "inconclusive"),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(low: float, high: float, verdict: str) -> None:
    assert verdict_above(low, high, 0.5) == verdict


def test_a_claim_of_several_parts_needs_all_of_them() -> None:
    assert verdict_of_parts(["supported", "supported"]) == "supported"
    assert verdict_of_parts(["supported", "inconclusive"]) == "inconclusive"
    assert verdict_of_parts(["supported", "inconclusive", "not supported"]) == "not supported"


def test_the_top_five_per_cent_are_rounded_up() -> None:
    assert [top_unit_count(units) for units in (1, 20, 21, 270)] == [1, 1, 2, 14]


def test_two_documents_give_no_interval_of_the_top_share() -> None:
    assert all(map(math.isnan, top_share_interval(pd.DataFrame({"a": [1.0, 0.0], "b": [1.0, 0.0]}))))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn:factor=8", "adarope:adapter=x"))


@pytest.mark.slow
def test_findings_state_their_number_with_interval_and_n(run: Run) -> None:
    findings = run.findings().set_index("question")
    (difference,) = [
        row for _, row in findings.loc[["loss.difference"]].iterrows() if row["where"].endswith("1024") and row["value"]
    ][:1]
    assert difference["model"] in run.models
    assert difference["baseline"] == "base"
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert difference["n"] == run.nll["doc"].nunique()
    assert f"{difference['value']:+.3f} nats/token" in difference["text"]
    longest = findings.loc[["length.extreme"]].iloc[0]
    assert longest["unit"] == f"L{longest['layer']}H{longest['head']}"
    assert longest["unit"] in longest["text"]
    claims = findings.loc[["influence.heavy_tail"]]
    assert claims["n"].notna().all()
    assert len(claims)


@pytest.mark.slow
def test_every_finding_about_needles_and_influence_states_its_number(run: Run) -> None:
    findings = run.findings()
    probed = findings[findings["topic"].isin(["Needle in a haystack", "Head influence"])]
    assert len(probed) > 10
    assert probed.loc[probed["value"].isna(), "text"].tolist() == []
