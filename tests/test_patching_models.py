"""Patching effects of several models are means over the same pairs, and claims about models follow their criteria."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from headscope.runs.run import Run
from headscope.runs.synthetic import synthetic_manifest
from headscope.runs.writer import RunWriter
from probes.patching import analysis, claims, findings, report
from probes.patching.schema import effect_columns

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


def claim_texts(run: Run) -> tuple[str, str]:
    kept, change = (finding.text for finding in claims.model_claims(run))
    return kept, change


def test_effects_of_every_model_are_means_over_the_pairs_that_count_in_all(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE, noise=0.3), "yarn": effects_around(BASE, noise=0.3, seed=1)}
    run = write_run(effects, {"base": {0}, "yarn": {1, 2}})
    shared = [3, 4, 5, 6, 7]
    for model, values in effects.items():
        expected = values[:, shared].mean(1)
        units = analysis.unit_effects(run).query("model == @model")
        np.testing.assert_allclose(units["effect"], expected, atol=1e-6)
        spans = analysis.span_effects(run).query("model == @model")
        np.testing.assert_allclose(spans["effect"], expected, atol=1e-6)
        heads = run.heads[run.heads["model"] == model].sort_values("head")
        np.testing.assert_allclose(heads["patching_z"], expected, atol=1e-6)
    texts = [finding.text for finding in findings.findings(run)]
    assert "Means are over the 5 pairs that differ by at least 0.5 logits in every model." in texts[0]
    assert any("yarn against base, over the same 5 pairs" in text for text in texts)


def test_a_model_without_any_usable_pair_does_not_remove_the_pairs_of_the_others(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE), "nope": effects_around(BASE)}
    run = write_run(effects, {"nope": {*range(PAIRS)}})
    units = analysis.unit_effects(run)
    assert set(units["model"]) == {"base"}
    assert set(units["pairs"]) == {PAIRS}
    assert not [*claims.model_claims(run)]


def test_models_without_a_common_pair_have_no_effects_and_the_overview_says_so(write_run: WriteRun) -> None:
    effects = {"base": effects_around(BASE), "yarn": effects_around(BASE)}
    run = write_run(effects, {"base": {*range(4)}, "yarn": {*range(4, PAIRS)}})
    assert analysis.unit_effects(run).empty
    overview = report.overview(run)
    assert overview is not None
    assert "in every model" in overview.warnings[0]


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
    kept_text, change_text = claim_texts(run)
    assert f"(our criterion): {kept}. The sum is +1.09 in base" in kept_text
    assert f"in both models): {changed}." in change_text
    assert "layer 0, head 0, layer 0, head 1, layer 0, head 2" in kept_text


def test_units_that_were_only_estimated_decide_nothing(write_run: WriteRun) -> None:
    run = write_run({"base": effects_around(BASE), "yarn": effects_around(BASE)}, estimated=(1, 5))
    kept, change = claim_texts(run)
    assert kept.endswith("inconclusive. 1 of the 5 heads was only estimated in yarn.")
    assert "over 4 heads patched exactly in both" in change


def test_one_common_head_is_named_in_the_singular(write_run: WriteRun) -> None:
    run = write_run({"base": effects_around(BASE[:1]), "yarn": effects_around(BASE[:1])})
    kept, change = claim_texts(run)
    assert "the 1 head of largest exact effect in base (layer 0, head 0) keeps at least 50 % of its effect in" in kept
    assert (
        "over 1 head patched exactly in both models): not supported. The absolute change exceeds 0.1 in 0 of 1"
        in change
    )


def test_two_pairs_are_too_few_for_a_verdict(write_run: WriteRun) -> None:
    run = write_run({"base": effects_around(BASE, pairs=2), "yarn": effects_around(BASE, pairs=2)})
    assert all("inconclusive" in text and "2 pairs are too few" in text for text in claim_texts(run))


def test_simultaneous_intervals_are_bonferroni_intervals_of_scipy() -> None:
    values = np.random.default_rng(0).normal(size=(5, 9))
    low, high = claims._simultaneous_intervals(values)
    expected = stats.t.interval(1 - 0.05 / 5, 8, values.mean(1), stats.sem(values, axis=1))
    np.testing.assert_allclose((low, high), expected)
