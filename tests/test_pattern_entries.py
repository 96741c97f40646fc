"""Patches of single entries of attention patterns: equal to eager attention with one weight replaced; estimates."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support import eager_patching, families
from support.prompt_pairs import random_pair
from support.tiny_studies import PAIRS, save_checkpoint

import headscope as hs
from headscope.interventions.heads import head_unit, head_units
from headscope.interventions.pair_runs import Direction, PairRuns
from probes.patching.plots import MAX_ENTRY_HEADS, plot_entries
from probes.patching.position_maps import entry_maps

FAMILIES = {
    name: families.MEASURABLE[name] for name in ("llama-gqa", "mistral-sliding", "gemma3", "olmo2", "phi", "qwen3")
} | {name: families.OTHERS[name].build for name in ("gpt_oss", "gpt2")}
PLACES = [(0, 0), (7, 2), (9, 9), (11, 1)]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_entries_equal_eager_attention_with_one_weight_replaced(family: str) -> None:
    model, pair = hs.load(FAMILIES[family]()), random_pair()
    pair_runs = PairRuns(model, pair, "logit_diff", memory_bytes=1e9)
    units = [head_unit(model.geometry, layer, 1) for layer in (0, model.geometry.layers - 1)]
    patched = [*product(units, PLACES)]
    for direction in get_args(Direction):
        run, source = (pair.corrupted, pair.clean) if direction == "denoising" else (pair.clean, pair.corrupted)
        own, other = (eager_patching.run(model, ids[:, :-1])[1] for ids in (run, source))
        with pair_runs.capturing():
            runs = [pair_runs.patch_entry(direction, unit, *place) for unit, place in patched]
            values = pair_runs.evaluate(direction, runs)
        for (unit, (query, key)), value in zip(patched, values, strict=True):
            pattern = own[unit.layer]["pattern"].clone()
            pattern[1, query, key] = other[unit.layer]["pattern"][1, query, key]
            replaced = {unit.layer: {"pattern": (slice(1, 2), slice(query, query + 1), pattern)}}
            logits = eager_patching.run(model, run[:, :-1], replaced)[0][-1]
            expected = (logits[pair.answer[0]] - logits[pair.wrong[0]]).item()
            assert value == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_estimates_of_entries_add_up_to_those_of_whole_rows(direction: Direction) -> None:
    """A row of the pattern is the sum of its entries, and the estimate is linear in them."""
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    pair_runs = PairRuns(model, random_pair(), "logit_diff", memory_bytes=1e9)
    units, queries = head_units(model.geometry), range(pair_runs.pair.aligned)
    with pair_runs.capturing():
        patched = [*product(units, queries)]
        runs = [pair_runs.patch("pattern", direction, [unit], range(at, at + 1)) for unit, at in patched]
        rows = pair_runs.estimate(direction, runs)
        by_layer = pair_runs.estimate_entries(direction)
    sums = [by_layer[unit.layer][unit.head, query].sum().item() for unit, query in patched]
    assert sums == pytest.approx(rows, abs=1e-6, rel=1e-4)
    assert max(float(estimate.abs().max()) for estimate in by_layer) > 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("entries")
    save_checkpoint(folder / "tiny")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS[:2])))
    return folder


def test_a_run_has_an_array_by_destination_and_source(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pairs": [f"{folder}/pairs.jsonl"], "pattern_entries": True, "activations": ["pattern"]}
    options |= {"keep_failing": True, "quiet": True, "out": tmp_path}
    axes, own = ["layer", "head", "destination", "source"], {"pair": "pair 1"}
    exact = hs.patch(f"{folder}/tiny", heads="L1H2,L2H0", method="exact", **options)
    values = exact.array("patching_entries", "metric_patched", axes, **own).values
    assert values.shape == (2, 2, 5, 5)
    visible = np.tril(np.ones((5, 5), bool))
    assert all((np.isfinite(values[at]) == visible).all() for at in ((0, 1), (1, 0)))  # heads L1H2 and L2H0
    verified = hs.patch(f"{folder}/tiny", verify_top=1, verify_random=0, **options)
    estimates = verified.table("patching_entries")
    assert {*estimates["method"]} == {"estimate"}
    assert len(estimates) == 2 * 16 * 15


@pytest.mark.slow
def test_the_picture_of_every_pair_has_the_entries_of_the_heads_of_largest_effect(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pairs": [f"{folder}/pairs.jsonl"], "keep_failing": True, "method": "estimate"}
    options |= {"activations": ["pattern"], "pattern_entries": True, "quiet": True, "out": tmp_path}
    run = hs.patch(f"{folder}/tiny", **options)
    (position_map,) = entry_maps(run)
    largest = position_map.rows["effect"].abs().groupby([position_map.rows["layer"], position_map.rows["head"]]).max()
    top = sorted(largest.nlargest(MAX_ENTRY_HEADS).index)
    figure = plot_entries(position_map)
    assert figure.layout.coloraxis.cmax == pytest.approx(largest.max())
    assert len(figure.data) == 2 * len(top)
    for panel, (pair, (layer, head)) in zip(figure.data, product(position_map.pairs, top), strict=True):
        assert panel.name == f"L{layer}H{head}"
        rows = position_map.pairs[pair]
        entries = rows[(rows["layer"] == layer) & (rows["head"] == head)]
        grid = np.full((5, 5), np.nan)
        grid[entries["destination"], entries["source"]] = entries["effect"]
        np.testing.assert_allclose(panel.z, grid, rtol=1e-6)
    assert [*figure.layout.xaxis.ticktext] == ["0: w1", "1: w10 | w40", "2: w3", "3: w20 | w50", "4: w4"]
    assert figure.layout.yaxis.ticktext == figure.layout.xaxis.ticktext


def test_entries_of_a_long_prompt_are_refused(refused: Callable[..., str], folder: Path) -> None:
    long = {side: " ".join(["w3"] * 128 + [word]) for side, word in (("clean", "w1"), ("corrupted", "w2"))}
    (folder / "long.jsonl").write_text(json.dumps(PAIRS[0] | long))
    flags = ("--pattern-entries", "--activation", "pattern", "--pairs", folder / "long.jsonl")
    line = refused(2, "patch", "--model", f"{folder}/tiny", "--device", "cpu", "--quiet", *flags)
    assert "129 tokens have too many pattern entries" in line
