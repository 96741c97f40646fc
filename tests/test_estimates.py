"""Estimates are marked, have no interval and no p-value, and lists of top heads say when they hold some."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.refusals import assert_names

from headscope.base.head_set import HeadSet
from headscope.base.heads import ESTIMATE_MARK, EXACT, estimate_mask
from headscope.plots.head_matrices import plot_matrix
from headscope.rendering.text import describe_extremes, describe_ranks, statistics_table
from headscope.runs.run import Run
from headscope.scores.head_scores import HeadScores
from probes.influence.analysis import head_statistics as influence_columns
from probes.influence.analysis import unit_sweeps
from probes.patching import analysis
from probes.patching.declaration import PatchingOptions
from probes.patching.run import select_verified

MODELS = [{"label": "base", "weights_sha256": "a" * 64, "geometry": {"layers": 2, "heads": 3, "kv_groups": 3}}]


class Tables:
    """A run with these tables and two layers of three heads."""

    def __init__(self, **tables: pd.DataFrame):
        self.manifest, self.models, self._tables = {"models": MODELS}, ["base"], tables
        self.tables = [*tables]

    def table(self, name: str) -> pd.DataFrame:
        return self._tables[name]

    def derived(self, compute: Any, *arguments: Any) -> Any:
        return compute(self, *arguments)


def patches(prompts: str, exact_heads: list[int], effects: list[float], pairs: int = 4) -> list[dict[str, Any]]:
    """Estimates of 0.01 for all heads of two layers, and exact effects of some heads of layer 0."""
    keys = {"model": "base", "prompts": prompts, "activation": "z", "direction": "denoising", "metric": "logit_diff"}
    values = {"metric_clean": 3.0, "metric_corrupted": -3.0, "is_normalised": True, "is_counted": True, "position": -1}
    rows = []
    for pair in range(pairs):
        pair_keys = {**keys, **values, "pair": f"pair {pair}"}
        for layer in range(2):
            for head in range(3):
                unit = {"layer": layer, "head": head, "kv_group": head}
                rows.append({**pair_keys, **unit, "method": "estimate", "effect": 0.01 + layer + 0.001 * pair})
        for head, effect in zip(exact_heads, effects, strict=True):
            unit = {"layer": 0, "head": head, "kv_group": head}
            rows.append({**pair_keys, **unit, "method": EXACT, "effect": effect + 0.001 * pair})
    return rows


@pytest.fixture
def patched() -> pd.DataFrame:
    rows = patches("a", [0, 1], [0.5, 0.2]) + patches("b", [0], [0.3])
    columns = analysis.head_statistics(Tables(patching=pd.DataFrame(rows)))  # type: ignore[arg-type]
    assert columns is not None
    return columns.reset_index()


def test_a_column_beside_each_effect_names_its_method(patched: pd.DataFrame) -> None:
    heads = patched.set_index(["layer", "head"])
    assert heads["patching_z_method"].to_dict() == {
        (0, 0): "exact",
        (0, 1): "mixed",
        **dict.fromkeys([(0, 2), (1, 0), (1, 1), (1, 2)], "estimate"),
    }
    assert heads["patching_z_low"].notna().to_list() == [True] + [False] * 5
    assert heads.loc[(0, 0), "patching_z_low"] < heads.loc[(0, 0), "patching_z"] < heads.loc[(0, 0), "patching_z_high"]


def test_estimates_of_patches_have_no_interval_and_no_p_value() -> None:
    (effects,) = analysis.sweeps(Tables(patching=pd.DataFrame(patches("a", [0, 1], [0.5, 0.2]))))  # type: ignore[arg-type]
    units = effects.units
    is_exact = units["method"] == EXACT
    assert is_exact.sum() == 2
    for name in ("low", "high", "p", "p_adjusted"):
        assert (units[name].notna() == is_exact).all()


def influence_rows(methods: dict[int, str]) -> pd.DataFrame:
    """Influence of zero ablation of three heads on four documents."""
    keys = {"model": "base", "context_length": 64, "component": "zero", "target": "none", "nll_before": 3.0, "layer": 0}
    return pd.DataFrame(
        [
            {**keys, "doc": f"d{doc}", "head": head, "kv_group": head, "method": method, "delta_nll": 0.1 + 0.01 * doc}
            for head, method in methods.items()
            for doc in range(4)
        ]
    )


def test_estimates_of_influence_have_no_interval_and_no_p_value() -> None:
    rows = influence_rows({0: EXACT, 1: "estimate", 2: "estimate"})
    (effects,) = unit_sweeps(rows, ["base"])
    for name in ("low", "high", "p", "p_adjusted"):
        assert (effects.units[name].notna() == effects.is_exact).all()
    best = effects.units.set_index("head")
    assert best.loc[0, "p_adjusted"] == pytest.approx(3 * best.loc[0, "p"]), "estimates count as tests"
    columns = influence_columns(Tables(influence=rows))  # type: ignore[arg-type]
    assert columns is not None
    assert columns["influence_zero_method"].to_list() == [EXACT, "estimate", "estimate"]
    assert columns["influence_zero_low"].notna().to_list() == [True, False, False]


def test_top_heads_prefer_exact_effects_and_say_what_estimates_mean(patched: pd.DataFrame) -> None:
    """All estimates of layer 1 are larger than the one exact effect."""
    first = HeadSet.top(patched, "patching_z", 1)
    assert first.heads == ((0, 0),)
    assert_names(first.source, "top 1", "patching_z", 3, "estimates")
    three = HeadSet.top(patched, "patching_z", 3)
    assert three.heads == ((0, 0), (1, 0), (1, 1))
    assert_names(three.source, "top 3", "patching_z", "2 of 3", "estimates")
    assert HeadSet.top(patched.assign(patching_z_method=EXACT), "patching_z", 3).source == "top 3 by patching_z"


def test_a_run_warns_when_estimates_enter_its_top_heads(
    patched: pd.DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, {"models": MODELS, "tables": {}})
    run.__dict__["heads"] = patched
    with caplog.at_level(logging.WARNING):
        run.top_heads("patching_z", 3)
        HeadScores.from_run(run, "patching_z")
    heads, scores = (record.getMessage() for record in caplog.records)
    assert_names(heads, "top 3", "patching_z", "base", "2 of 3")
    assert_names(scores, "'patching_z'", "5 of 6", "'base'")


def test_tables_charts_and_sentences_mark_estimates(patched: pd.DataFrame, tmp_path: Path) -> None:
    (caption_row, *_) = statistics_table("", patched[patched["layer"] == 1]).rows
    assert any(cell.startswith(ESTIMATE_MARK) for cell in caption_row)
    assert "patching z method" not in statistics_table("", patched).column_names
    assert_names(describe_extremes(patched, "patching_z", "base"), f"{ESTIMATE_MARK}: 5 of 6")
    marks = np.array(plot_matrix(patched, "patching_z", "base").data[0].text)
    assert ((marks == ESTIMATE_MARK).ravel() == estimate_mask(patched, "patching_z")).all()
    run = Run(tmp_path, {"models": MODELS, "tables": {}})
    run.__dict__["heads"] = patched
    assert f"({ESTIMATE_MARK}1.0" in describe_ranks(run, "patching_z", 1, 0)
    assert f"({ESTIMATE_MARK}" not in describe_ranks(run, "patching_z", 0, 0)


def test_heads_are_verified_if_their_estimates_differ_in_sign_between_pairs() -> None:
    """The queries of largest effect on eight IOI pairs (0.27) had mean estimate 0.03, rank 11, and rank 4 by root mean
    square."""
    estimates = pd.DataFrame(
        {"layer": [0, 0, 1, 1, 2, 2], "kv_group": 0, "head": 0, "change": [0.2, -0.2, 0.05, 0.05, 0.01, 0.01]}
    )
    (unit,) = select_verified(estimates, PatchingOptions(verify_top=1, verify_random=0), [0])
    assert unit.layer == 0
