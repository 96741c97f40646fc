"""Patching effects of several models are means over the same pairs, and claims about models follow their criteria."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.refusals import assert_names

from benchmarks.synthetic_run import synthetic_manifest
from headscope.results.effects.sweep import effects_table
from headscope.results.result import Result
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from probes.patching import analysis
from probes.patching.analysis import model_results
from probes.patching.declaration import effect_columns
from probes.patching.results import results

PAIRS, UNITS = 8, 6
WriteRun = Callable[..., Run]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Write a run from effects [units, pairs] by model, its heads in layer 0; `unusable` pairs do not count in a
    model, and `estimated` units were not patched in the last one."""

    def write(
        effects: Mapping[str, np.ndarray],
        unusable: Mapping[str, set[int]] | None = None,
        estimated: tuple[int, ...] = (),
    ) -> Run:
        with RunWriter.open(tmp_path, "models", {"models": list(effects)}) as writer:
            for model, values in effects.items():
                is_last = model == [*effects][-1]
                for pair, of_pair in enumerate(values.T):
                    corrupted = 3.9 if pair in (unusable or {}).get(model, ()) else 0.0
                    columns = effect_columns(corrupted + (4 - corrupted) * of_pair, 4.0, corrupted, "denoising")
                    methods = ["estimate" if is_last and unit in estimated else "exact" for unit in range(len(of_pair))]
                    keys = {"model": model, "prompts": "ioi", "pair": f"ioi {pair}", "layer": 0, "position": -1}
                    keys |= {"activation": "z", "direction": "denoising", "metric": "logit_diff", "group": ""}
                    heads = np.arange(len(of_pair))
                    rows = pd.DataFrame({"head": heads, "kv_group": heads // 3, "method": methods, **columns, **keys})
                    spans = rows.drop(columns="position").assign(span="last", first=0, last=0)
                    writer.add(f"{model}/{pair}", {"patching": rows, "patching_spans": spans})
            cells = [f"{model}/{pair}" for model, values in effects.items() for pair in range(values.shape[1])]
            return writer.commit(cells, synthetic_manifest(list(effects), 1, UNITS, 2))

    return write


def effects_around(means: list[float], pairs: int = PAIRS, noise: float = 0.02, seed: int = 0) -> np.ndarray:
    return np.array(means)[:, None] + np.random.default_rng(seed).normal(0, noise, (len(means), pairs))


BASE = [0.5, 0.3, 0.2, 0.1, 0.0, -0.1]


def claims(run: Run) -> tuple[Result, Result]:
    kept, changed = (result for result in model_results(run) if result.verdict)
    return kept, changed


@pytest.mark.slow
def test_effects_of_every_model_are_means_over_the_pairs_that_count_in_all(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE, noise=0.3), "yarn": effects_around(BASE, noise=0.3, seed=1)}
    run = write_run(effects, {"base": {0}, "yarn": {1, 2}})
    shared = [3, 4, 5, 6, 7]
    for model, values in effects.items():
        expected = values[:, shared].mean(1)
        for sweeps in (analysis.sweeps(run), analysis.span_sweeps(run)):
            (effects_of_model,) = (one for one in sweeps if one.model == model)
            np.testing.assert_allclose(effects_of_model.units["effect"], expected, atol=1e-6)
            assert [*effects_of_model.values] == [f"ioi {number}" for number in shared]
        heads = run.heads[run.heads["model"] == model].sort_values("head")
        np.testing.assert_allclose(heads["patching_z"], expected, atol=1e-6)
    metrics = [result for result in results(run) if result.question == "patching.metric"]
    assert [(result.model, result.details["shared"]) for result in metrics] == [("base", 5), ("yarn", 5)]
    (change,) = (result for result in results(run) if result.question == "patching.largest_change")
    assert (change.model, change.baseline, change.n) == ("yarn", "base", 5)


def test_a_model_without_any_usable_pair_does_not_remove_the_pairs_of_the_others(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE), "nope": effects_around(BASE)}
    run = write_run(effects, {"nope": {*range(PAIRS)}})
    units = effects_table(analysis.sweeps(run))
    assert set(units["model"]) == {"base"}
    assert set(units["n"]) == {PAIRS}
    assert not [*model_results(run)]


def test_models_without_a_common_pair_have_no_effects_and_a_warning_says_so(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE), "yarn": effects_around(BASE)}
    run = write_run(effects, {"base": {*range(4)}, "yarn": {*range(4, PAIRS)}})
    assert not analysis.sweeps(run)
    assert "patching.no_effects" in {result.question for result in results(run)}


@pytest.mark.parametrize(
    ("other", "kept", "changed"),
    [
        (BASE, "supported", "not supported"),
        ([0.1, 0.1, 0.1, 0.0, 0.0, 0.6], "not supported", "supported"),
        ([0.6, 0.3, 0.2, 0.1, 0.0, -0.1], "supported", "inconclusive"),  # a change of the criterion's size
    ],
)
def test_claims_follow_their_criteria(write_run: WriteRun, other: list[float], kept: str, changed: str) -> None:
    run = write_run({"base": effects_around(BASE), "yarn": effects_around(other, seed=1)})
    kept_claim, changed_claim = claims(run)
    assert (kept_claim.verdict, changed_claim.verdict) == (kept, changed)
    assert kept_claim.details["before"] == pytest.approx(1.09, abs=0.01)
    assert kept_claim.details["heads"][:3] == ["L0H0", "L0H1", "L0H2"]
    assert kept_claim.n == len(kept_claim.by_sample) == PAIRS


def test_units_that_were_only_estimated_decide_nothing(write_run: WriteRun) -> None:
    run = write_run({"base": effects_around(BASE), "yarn": effects_around(BASE)}, estimated=(1, 5))
    kept, changed = claims(run)
    assert (kept.verdict, kept.reason, kept.has_interval) == ("inconclusive", "estimated", False)
    assert [kept.details[name] for name in ("estimated", "units", "unit_nouns")] == [1, 5, "heads"]
    assert changed.selected_from == changed.details["compared"] == 4


def test_one_common_head_is_compared(write_run: WriteRun) -> None:
    kept, changed = claims(write_run({"base": effects_around(BASE[:1]), "yarn": effects_around(BASE[:1])}))
    assert (kept.verdict, kept.details["top"], kept.details["heads"]) == ("supported", 1, ["L0H0"])
    assert (changed.verdict, changed.unit, changed.details["stable"]) == ("not supported", "L0H0", 1)


def test_an_undecided_change_says_how_many_pairs_would_decide(write_run: WriteRun) -> None:
    """Only the undecided unit needs more pairs, not the one of largest change."""
    base = effects_around(BASE, noise=0.001)
    noise = np.zeros_like(base)
    noise[4] = np.linspace(-0.3, 0.3, PAIRS)
    change = np.array([0.05, 0, 0, 0, 0.02, 0])[:, None]
    _, changed = claims(write_run({"base": base, "yarn": base + change + noise}))
    assert (changed.verdict, changed.unit, changed.details["undecided"]) == ("inconclusive", "L0H0", 1)
    half_width = stats.t.ppf(1 - 0.025 / UNITS, PAIRS - 1) * stats.sem(noise[4])
    assert changed.details["needed"] == np.ceil(PAIRS * (half_width / 0.08) ** 2)
    assert_names(sentence(changed), f"{changed.details['needed']} pairs")


def test_two_pairs_are_too_few_for_a_verdict(write_run: WriteRun) -> None:
    run = write_run({"base": effects_around(BASE, pairs=2), "yarn": effects_around(BASE, pairs=2)})
    for claim in claims(run):
        assert (claim.verdict, claim.reason, claim.n) == ("inconclusive", "few", 2)
        assert_names(sentence(claim), "2 pairs", "3 pairs")


@pytest.mark.slow
def test_keys_of_results_are_unique_and_name_no_head(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE), "yarn": effects_around(BASE[::-1])}
    keys = [result.key for result in results(write_run(effects))]
    assert len(keys) == len({*keys})
    top = next(result for result in results(write_run(effects)) if result.question == "patching.top")
    assert top.key == (
        "patching.top",
        "base",
        "",
        "direction=denoising",
        "intervention=z",
        "metric=logit_diff",
        "prompts=ioi",
    )
