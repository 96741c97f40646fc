"""Random controls of sets of heads or KV groups: as many others of each layer, never a unit of the set, or none."""

import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from support import families, tiny_studies
from support.refusals import assert_names

import headscope as hs
from headscope.rendering import assembly
from headscope.results.effects.groups import missing_control, random_controls
from headscope.results.words import sentence
from headscope.runs.run import Run
from headscope.study.config import build_study
from headscope.study.runner import run_study
from probes.ablation.results import results as ablation_results
from probes.influence import view
from probes.needle import analysis
from probes.needle.ablation import AblationWork, select_heads
from probes.needle.results import ablation_results as needle_results

FOUR_LAYERS_OF_FOUR = [(layer, head) for layer in range(4) for head in range(4)]


@st.composite
def sets_of_units(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """A set of heads, and all heads in any order; layers may have different numbers of heads."""
    counts = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    candidates = draw(st.permutations([(layer, head) for layer, count in enumerate(counts) for head in range(count)]))
    size = draw(st.integers(1, len(candidates)))
    return candidates[:size], candidates


@given(sets_of_units(), st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_a_control_has_as_many_units_per_layer_and_none_of_the_set(
    sets: tuple[list[tuple[int, int]], list[tuple[int, int]]], seeds: list[int]
) -> None:
    units, candidates = sets
    wanted, present = (Counter(layer for layer, _ in members) for members in sets)
    controls = random_controls(units, candidates, [[seed] for seed in seeds])
    crowded = [layer for layer, count in wanted.items() if present[layer] < 2 * count]
    assert len(controls) == (0 if crowded else len(seeds))
    assert bool(missing_control(units, candidates)) == bool(crowded)
    for control in controls:
        assert len({*control}) == len(units)
        assert {*control} <= {*candidates} - {*units}
        assert Counter(layer for layer, _ in control) == wanted
    others = [unit for unit in candidates if unit not in units]
    assert random_controls(units[::-1], candidates[::-1], [[seed] for seed in seeds]) == controls
    assert bool(random_controls(units, others, [[0]])) == bool(controls), "candidates may leave out the set"


def test_every_set_of_others_is_equally_likely() -> None:
    units, candidates, draws = [(0, 2), (1, 0), (1, 3)], [(0, head) for head in range(4)], 6000
    candidates += [(1, head) for head in range(6)]
    controls = random_controls(units, candidates, [[7, draw] for draw in range(draws)])
    counts = Counter(map(tuple, controls))
    assert len(counts) == 3 * 6  # one of 3 heads, and two of 4
    assert stats.chisquare([*counts.values()]).pvalue > 0.01


@pytest.mark.parametrize(
    ("units", "candidates", "named"),
    [
        ([(3, 0)], [(layer, 0) for layer in range(6)], ("layer 13", 1, 0)),  # one KV group per layer
        ([(1, 0), (2, 0), (2, 1), (2, 3)], FOUR_LAYERS_OF_FOUR, ("layer 12", 3, 1)),
    ],
)
def test_a_set_without_enough_others_in_a_layer_has_no_control(
    units: list[tuple[int, int]], candidates: list[tuple[int, int]], named: tuple[object, ...]
) -> None:
    assert random_controls(units, candidates, [[0]]) == []
    assert_names(missing_control(units, candidates, [*range(10, 16)]), *named)


def run_influence(family: str, out: Path, **section: Any) -> Run:
    texts = tiny_studies.save_texts(out / "texts")
    influence = {"lengths": [24], "components": ["zero"], "method": "exact", "models": ["m"], "draws": 3, **section}
    study = build_study({"models": {"m": "m"}, "texts": {"source": texts, "docs": 2}, "influence": influence})
    model = hs.load(families.SPECS[family].build(), tokenizer=tiny_studies.tokenizer())
    return run_study(study, out / "runs", in_memory_models={"m": model})


def curve_sets(run: Run) -> dict[str, list[int]]:
    """The sizes of the top and the random sets."""
    rows = run.table("influence_sets").astype({"choice": "str"})
    return {choice: sorted({*of_choice["size"]}) for choice, of_choice in rows.groupby("choice")}


def curve(run: Run) -> Any:
    """The chart of sets that are changed together."""
    groups = view.charts(assembly.render_context(run))
    figures = [chart.figure for group in groups for chart in group.charts]
    (figure,) = [figure for figure in figures if "changed together" in str(figure.layout.title.text)]
    return figure


@pytest.mark.slow
def test_influence_of_one_kv_group_per_layer_has_no_random_sets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "headscope"):
        run = run_influence("llama-mqa", tmp_path, unit="group")
    assert curve_sets(run) == {"top": [1, 2, 4]}
    (warning,) = [record.getMessage() for record in caplog.records if "control" in record.getMessage()]
    assert_names(warning, "m", "zero", 1, 0)
    assert [trace.name for trace in curve(run).data if trace.name] == ["top by influence"]


@pytest.mark.slow
def test_random_sets_of_influence_are_never_those_that_are_tested(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A random set of one head has the influence of one of the other heads of its layer; larger sets need room."""
    with caplog.at_level(logging.WARNING, "headscope"):
        run = run_influence("llama", tmp_path, unit="head")
    alone = run.influence.groupby(["layer", "head"], observed=True)["delta_nll"].mean()
    ranked = [*alone.sort_values(ascending=False).index]
    crowded = [size for size in (1, 2, 4, 8, 16) if max(Counter(layer for layer, _ in ranked[:size]).values()) > 2]
    sizes = curve_sets(run)
    assert sizes["top"] == [1, 2, 4, 8, 16]
    assert sizes["random"] == [size for size in sizes["top"] if size not in crowded]
    assert bool(crowded[:-1]) == any("control" in record.getMessage() for record in caplog.records)
    rows = run.table("influence_sets").astype({"choice": "str", "doc": "str", "delta_nll": "float64"})
    single = run.influence.astype({"doc": "str", "delta_nll": "float64"})
    layer, top = ranked[0]
    for row in rows[(rows["choice"] == "random") & (rows["size"] == 1)].to_dict("records"):
        others = single[(single["doc"] == row["doc"]) & (single["layer"] == layer) & (single["head"] != top)]
        assert np.abs(others["delta_nll"] - row["delta_nll"]).min() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "has_control"), [(["L1H0", "L1H2"], True), (["L1H0", "L1H2", "L1H3"], False)])
def test_ablation_of_three_of_four_heads_has_no_control_and_says_so(
    heads: list[str], has_control: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = {"prompt": "w1 w5 w9 w5", "answer": " w7"}
    study = build_study({"models": {"m": "m"}, "ablation": {**pair, "heads": heads, "random_sets": 3}})
    model = hs.load(families.SPECS["llama-gqa"].build(), tokenizer=tiny_studies.tokenizer())
    with caplog.at_level(logging.WARNING, "headscope"):
        run = run_study(study, tmp_path, in_memory_models={"m": model})
    draws = run.table("ablation_sets").groupby("draw")["metric_after"].unique()
    assert [*draws.index] == ([0, 1, 2, 3] if has_control else [0])
    warnings = [record.getMessage() for record in caplog.records if "control" in record.getMessage()]
    assert len(warnings) == (0 if has_control else 1)
    found = {result.question: sentence(result) for result in ablation_results(run)}
    assert ("ablation.control" in found) == has_control
    assert ("no random control" in found["ablation.set"]) == (not has_control)
    if has_control:  # the other two heads of the layer, in every draw
        others = study.model_copy(update={"name": "others"})
        others.probe_options["ablation"].heads[:] = ["L1H1", "L1H3"]
        expected = run_study(others, tmp_path / "others", in_memory_models={"m": model}).table("ablation_sets")
        assert {*draws[1], *draws[2], *draws[3]} == {*expected[expected["draw"] == 0]["metric_after"]}
    else:
        assert_names(warnings[0], "layer 1", 3, 1)


def ranking(*first: tuple[int, int]) -> pd.DataFrame:
    """All heads of four layers of four, these first."""
    heads = [*first, *(head for head in FOUR_LAYERS_OF_FOUR if head not in first)]
    return pd.DataFrame(heads, columns=["layer", "head"]).assign(score=np.linspace(1, 0, len(heads)))


def test_random_heads_of_a_needle_ablation_avoid_the_top_heads_or_are_absent() -> None:
    ranked = ranking((2, 1), (2, 3), (0, 0), (2, 0))
    for draw in range(1, 20):
        chosen = select_heads(ranked, AblationWork("zero", 3, draw, 0, ()), 0)
        assert {*chosen[chosen["layer"] == 2]["head"]} == {0, 2}
        assert not {*chosen[chosen["layer"] == 0]["head"]} & {0}
        assert len(chosen) == 3
        assert select_heads(ranked, AblationWork("zero", 4, draw, 0, ()), 0).empty
    assert len(select_heads(ranked, AblationWork("zero", 4, 0, 0, ()), 0)) == 4


def needle_run(controlled: dict[int, list[str]]) -> Any:
    """A run of two needles with 1 and 4 top heads ablated, and random sets by size for these needles."""
    keys = {"model": "m", "mode": "strict", "context_length": 60, "doc": "d", "ablation": "zero"}
    trials = [{**keys, "needle": needle, "depth": depth} for needle in ("one", "two") for depth in (0.2, 0.6, 0.9)]
    sets = [(size, 0, ["one", "two"]) for size in (1, 4)]
    sets += [(size, draw, needles) for size, needles in controlled.items() for draw in (1, 2)]
    rows = [
        {**trial, "size": size, "draw": draw, "success": draw > 0}
        for size, draw, needles in sets
        for trial in trials
        if trial["needle"] in needles
    ]
    tables = {"needle_ablation": pd.DataFrame(rows)}
    tables["needles"] = pd.DataFrame(trials).drop(columns="ablation").assign(success=True)
    run = SimpleNamespace(tables=tables, models=["m"], table=tables.__getitem__)
    run.derived = lambda derive: derive(run)
    return run


@pytest.mark.parametrize(
    ("controlled", "sizes"),
    [
        ({1: ["one", "two"], 4: ["one", "two"]}, [1, 4]),
        ({1: ["one", "two"], 4: ["two"]}, [1]),
        ({1: ["one", "two"]}, [1]),
        ({}, []),
    ],
)
def test_a_needle_ablation_is_judged_at_sizes_with_a_control(
    controlled: dict[int, list[str]], sizes: list[int]
) -> None:
    """Also if only one half of the needles has one: its trials are not those of the top heads."""
    run = needle_run(controlled)
    (effects,) = analysis.ablation_sweeps(run)
    random = effects.units[(effects.units["heads"] == "random") & (effects.units["size"] > 0)]
    assert random["size"].tolist() == sizes
    found = {result.question.removeprefix("retrieval."): result for result in needle_results(run)}
    assert found["ablated_success"].where["size"] == 4
    assert ("no random control" in sentence(found["ablated_success"])) == (4 not in sizes)
    compared = {name: found[name].where["size"] for name in found if name != "ablated_success"}
    names = ("random_ablated_success", "ablation_drop", "ablation_claim")
    assert compared == (dict.fromkeys(names, max(sizes)) if sizes else {})
    assert {*analysis.ablation_curves(run).query("heads == 'random' and size > 0")["size"]} == {*sizes}
