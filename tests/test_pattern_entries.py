"""Patches of single entries of attention patterns: equal to eager attention with one weight replaced; estimates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import eager_patching, families
from support.prompt_pairs import random_pair
from support.tiny_studies import PAIRS, save_checkpoint

import headscope as hs
from headscope.forward.interventions import Unit
from headscope.patching.activation_patching import Direction, PatchingReplay
from headscope.patching.pattern_entries import PatternEntries
from headscope.rendering import assembly
from probes.patching import report
from probes.patching.analysis import entry_effects
from probes.patching.entry_plots import MAX_ENTRY_HEADS

FAMILIES = {
    name: families.MEASURABLE[name] for name in ("llama-gqa", "mistral-sliding", "gemma3", "olmo2", "phi", "qwen3")
} | {name: families.OTHERS[name].build for name in ("gpt_oss", "gpt2")}
PLACES = [(0, 0), (7, 2), (9, 9), (11, 1)]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_entries_equal_eager_attention_with_one_weight_replaced(family: str) -> None:
    model, pair = hs.load(FAMILIES[family]()), random_pair()
    replay = PatchingReplay(model, pair, "logit_diff", memory_bytes=1e9)
    entries = PatternEntries(replay)
    units = [Unit(layer, model.geometry.kv_group(layer, 1), 1) for layer in (0, model.geometry.layers - 1)]
    for direction in ("denoising", "noising"):
        run, source = (pair.corrupted, pair.clean) if direction == "denoising" else (pair.clean, pair.corrupted)
        own, other = (eager_patching.run(model, ids[:, :-1])[1] for ids in (run, source))
        with replay.capturing():
            patched = {unit.layer: values for unit, values in entries.patch(direction, units)}
        for layer, values in patched.items():
            for query, key in PLACES:
                pattern = own[layer]["pattern"].clone()
                pattern[1, query, key] = other[layer]["pattern"][1, query, key]
                replaced = {layer: {"pattern": (slice(1, 2), slice(query, query + 1), pattern)}}
                logits = eager_patching.run(model, run[:, :-1], replaced)[0][-1]
                expected = (logits[pair.answer[0]] - logits[pair.wrong[0]]).item()
                assert values[entries.entries.index((query, key))] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_estimates_of_entries_add_up_to_those_of_whole_rows(direction: Direction) -> None:
    """A row of the pattern is the sum of its entries, and the estimate is linear in them."""
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    replay = PatchingReplay(model, random_pair(), "logit_diff", memory_bytes=1e9)
    entries, length = PatternEntries(replay), random_pair().aligned
    with replay.capturing():
        rows = replay.estimate(["pattern"], direction, [range(at, at + 1) for at in range(length)])["pattern"]
        by_layer = entries.estimate(direction)
    queries = torch.tensor(entries.entries)[:, 0]
    for layer, estimate in enumerate(by_layer):
        sums = torch.zeros(len(estimate), length, dtype=torch.float64).index_add_(1, queries, estimate)
        torch.testing.assert_close(sums, rows[layer], atol=1e-6, rtol=1e-4)
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
def test_the_picture_has_a_cell_per_entry_of_the_heads_of_largest_effect(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pairs": [f"{folder}/pairs.jsonl"], "keep_failing": True, "method": "estimate"}
    options |= {"activations": ["pattern"], "pattern_entries": True, "quiet": True, "out": tmp_path}
    run = hs.patch(f"{folder}/tiny", **options)
    groups = {group.heading: [*group.charts] for group in report.charts(assembly.render_context(run))}
    (chart,) = groups["Patching of entries of the attention pattern"]
    (rows,) = entry_effects(run)
    largest = rows["effect"].abs().groupby([rows["layer"], rows["head"]]).max()
    top = sorted(largest.nlargest(MAX_ENTRY_HEADS).index)
    panels = chart.figure.data
    assert [panel.name for panel in panels] == [f"L{layer}H{head}" for layer, head in top]
    for panel, (layer, head) in zip(panels, top, strict=True):
        entries = rows[(rows["layer"] == layer) & (rows["head"] == head)]
        grid = np.full((5, 5), np.nan)
        grid[entries["destination"], entries["source"]] = entries["effect"]
        np.testing.assert_allclose(panel.z, grid)
    assert chart.figure.layout.coloraxis.cmax == pytest.approx(largest.max())
    words = run.table("patching_tokens").query("pair == 'pair 0'")["clean"].str.strip()
    assert all(label.startswith(word) for label, word in zip(chart.figure.layout.xaxis.ticktext, words, strict=True))


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("--pattern-entries is for the activation 'pattern'", ("--pattern-entries",)),
        (
            "129 tokens have too many pattern entries",
            ("--pattern-entries", "--activation", "pattern", "--pairs", "long"),
        ),
    ],
)
def test_unusable_entries_are_refused(
    refused: Callable[..., str], folder: Path, message: str, flags: tuple[Any, ...]
) -> None:
    long = {side: " ".join(["w3"] * 128 + [word]) for side, word in (("clean", "w1"), ("corrupted", "w2"))}
    (folder / "long.jsonl").write_text(json.dumps(PAIRS[0] | long))
    flags = tuple(folder / "long.jsonl" if flag == "long" else flag for flag in flags)
    pairs = () if "--pairs" in flags else ("--pairs", folder / "pairs.jsonl")
    assert message in refused(2, "patch", "--model", f"{folder}/tiny", "--device", "cpu", "--quiet", *pairs, *flags)
