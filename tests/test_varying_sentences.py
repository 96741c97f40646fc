"""No sentence stays the same whatever the tables of a run hold: each of them could have been false."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support.synthetic_rows import ROWS
from support.synthetic_runs import synthetic_run

from headscope.results.collection import all_results
from headscope.results.effects.results import sweep_results
from headscope.results.effects.sweep import Effects, Sweep, sweep_effects
from headscope.results.words import headline, sentence

SWEEP = Sweep(
    keys=("model", "prompts", "metric", "intervention", "direction"),
    sample="pair",
    value="effect",
    methods=("exact", "estimate"),
)
DRAWS = 8
"""Draws at most; fewer if every sentence has varied."""
ABOUT_THE_METHOD = {"patching.estimated", "patterns.maps"}
"""Questions whose sentences say what was measured, not what came out."""


def random_effects(units: int, exact: int, pairs: int, rng: np.random.Generator) -> Effects:
    """A sweep of random estimates of all units and random effects of the first ones, whichever these are."""
    keys = {"model": "base", "prompts": "own", "metric": "logit_diff", "intervention": "z", "direction": "denoising"}
    rows = [
        {**keys, "pair": f"p{pair}", "layer": unit // 4, "kv_group": 0, "head": unit % 4, "method": method}
        for method, count in (("estimate", units), ("exact", exact))
        for unit in rng.permutation(units)[:count]
        for pair in range(pairs)
    ]
    signal = rng.normal(0, rng.choice([0.1, 3.0]), units)
    table = pd.DataFrame(rows)
    table["effect"] = signal[4 * table["layer"] + table["head"]] + rng.normal(0, 1, len(table))
    (effects,) = sweep_effects(table, SWEEP, ["base"])
    return effects


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "exact", "pairs"),
    [(1, 1, 4), (4, 4, 1), (4, 4, 6), (9, 9, 6), (12, 4, 6), (12, 12, 6), (24, 11, 6), (24, 1, 6), (24, 0, 6)],
)
def test_every_sentence_about_random_effects_varies(units: int, exact: int, pairs: int) -> None:
    details = {"activation": "head output z"}
    texts: dict[str, set[tuple[str, ...]]] = {}
    for seed in range(DRAWS):
        rng = np.random.default_rng([units, exact, pairs, seed])
        effects = random_effects(units, exact, pairs, rng)
        for result in sweep_results(effects, "patching", "heads", details):
            clauses = (sentence(result), headline(result))
            texts.setdefault(result.question, set()).add(clauses)
            shared, top = (result.details.get(name) for name in ("shared", "top"))
            texts.setdefault(f"{result.question}, overlap", set()).add((str(shared),)) if top else None
    constant = [name for name, versions in texts.items() if len(versions) == 1 and name not in ABOUT_THE_METHOD]
    assert not constant


def test_agreement_over_fewer_than_ten_units_is_no_result() -> None:
    for exact, is_shown in ((9, False), (10, True)):
        effects = random_effects(24, exact, 6, np.random.default_rng(0))
        results = [*sweep_results(effects, "patching", "heads", {"activation": "head output z"})]
        agreement = [result for result in results if result.question == "patching.agreement"]
        assert bool(agreement) == is_shown
        assert all(result.details["top"] == 5 for result in agreement), "half of the compared heads, not all"


def test_a_unit_that_has_no_rival_is_not_the_highest() -> None:
    effects = random_effects(1, 1, 4, np.random.default_rng(0))
    results = [*sweep_results(effects, "patching", "heads", {"activation": "head output z"})]
    assert "patching.only" in {result.question for result in results}
    assert not {"patching.top", "patching.lowest"} & {result.question for result in results}


def test_a_headline_says_if_the_largest_effect_is_not_clearly_different_from_0() -> None:
    for seed in range(20):
        effects = random_effects(9, 9, 6, np.random.default_rng(seed))
        results = [*sweep_results(effects, "patching", "heads", {"activation": "head output z"})]
        (top,) = (result for result in results if result.question == "patching.top")
        assert ("not clearly different from 0" in headline(top)) == (top.low <= 0 <= top.high)


@pytest.mark.slow
def test_every_sentence_about_random_tables_varies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of all probes whose results are more than verdicts on claims; those are drawn in the tests of claims."""
    texts: dict[str, list[tuple[str, ...]]] = {}
    for seed in range(DRAWS):
        sizes = {"layers": 3, "heads": 4, "pairs": 4, "seed": seed}
        run = synthetic_run(tmp_path / str(seed), probes={"measure", *ROWS}, randomised=seed > 0, **sizes)
        drawn: dict[str, list[str]] = {}
        for result in all_results(run):
            drawn.setdefault(result.question, []).extend((sentence(result), headline(result)))
        for question, sentences in drawn.items():
            texts.setdefault(question, []).append(tuple(sentences))
        in_all_draws = {name: set(draws) for name, draws in texts.items() if len(draws) == seed + 1}
        constant = {name for name, versions in in_all_draws.items() if len(versions) == 1} - ABOUT_THE_METHOD
        if not constant:
            break  # a sentence that is missing in some draws could have been false, too
    assert len(texts) > 100
    assert constant == set()
    assert [record.getMessage() for record in caplog.records if record.funcName == "report_broken"] == []
