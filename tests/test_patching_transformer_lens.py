"""Activation and path patching of the real model equal those of transformer-lens, which patches L x L caches."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.prompt_pairs import ioi_pairs
from torch import Tensor
from transformer_lens import patching as lens
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import headscope as hs
from headscope.interventions.heads import Unit, head_unit
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import GROUP_ACTIVATIONS, PairRuns, patched_units
from headscope.interventions.parts import PART_NAMES, inspect_layer_parts
from headscope.interventions.path_patching import Path, PathPatching, inspect_paths
from headscope.positions.model import Model

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOLERANCE = 1e-3
"""Of the logit difference between the two runs of a pair."""
LAYER_TOLERANCE = 1e-5
"""The same for patches of layers, which need no attention of another kind."""
PAIRS, UNITS, POSITION_UNITS = 2, 10, 6
SAMPLED_HEADS, SAMPLED_LAYERS = 40, 6
LARGE_EFFECTS = (0, 23)
"""Layers in which every part has a large effect, in both tiers."""
FUNCTIONS = {
    "z": lens.get_act_patch_attn_head_out_all_pos,
    "q": lens.get_act_patch_attn_head_q_all_pos,
    "k": lens.get_act_patch_attn_head_k_all_pos,
    "v": lens.get_act_patch_attn_head_v_all_pos,
    "pattern": lens.get_act_patch_attn_head_pattern_all_pos,
}
POSITION_FUNCTIONS = {
    "z": lens.get_act_patch_attn_head_out_by_pos,
    "q": lens.get_act_patch_attn_head_q_by_pos,
    "k": lens.get_act_patch_attn_head_k_by_pos,
    "v": lens.get_act_patch_attn_head_v_by_pos,
    "pattern": lens.get_act_patch_attn_head_pattern_by_pos,
}


LAYER_FUNCTIONS = {
    "resid_pre": lens.get_act_patch_resid_pre,
    "attn_out": lens.get_act_patch_attn_out,
    "mlp_out": lens.get_act_patch_mlp_out,
}


@pytest.fixture(scope="module")
def bridge() -> Any:
    """A bridge over a second copy of the checkpoint, since a bridge changes the module that it wraps."""
    module = hs.load("smollm2-135m", device="cpu").module
    return build_bridge_from_module(module, type(module).__name__, hf_config=module.config)


@pytest.fixture(scope="module")
def pairs(smollm2: Model) -> list[PairTokens]:
    return ioi_pairs(smollm2, PAIRS)


def index_of(unit: Unit, activation: str) -> tuple[int, int]:
    """Layer and head, or layer and KV group."""
    return unit.layer, unit.kv_group if activation in GROUP_ACTIVATIONS else unit.head


def logit_difference_of(pair: PairTokens) -> Callable[[Tensor], Tensor]:
    """The metric of logits [1, L, vocabulary] in transformer-lens."""
    return lambda logits: logits[0, -1, pair.answer[0]] - logits[0, -1, pair.wrong[0]]


@cache
def activation_cache(bridge: Any, prompt: Tensor) -> Any:
    """All activations of transformer-lens for a prompt without its answer."""
    return bridge.run_with_cache(prompt[:, :-1])[1]


def patched_by_lens(bridge: Any, pair: PairTokens, function: Any, index: pd.DataFrame) -> np.ndarray:
    """The logit difference of each row of `index` in transformer-lens."""
    cache, corrupted = activation_cache(bridge, pair.clean), pair.corrupted[:, :-1]
    return function(bridge, corrupted, cache, logit_difference_of(pair), index_axis_names=None, index_df=index).numpy()


def assert_equal(pair_runs: PairRuns, values: list[float], expected: np.ndarray) -> None:
    scale = abs(pair_runs.clean_value - pair_runs.corrupted_value)
    assert np.abs(np.array(values) - pair_runs.corrupted_value).max() > 1e-4 * scale
    np.testing.assert_allclose(values, expected, atol=TOLERANCE * scale, rtol=0)


@pytest.mark.exhaustive(sample=2)
@torch.no_grad()
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_patches_of_all_positions_equal_those_of_transformer_lens(
    smollm2: Model, bridge: Any, pairs: list[PairTokens], activation: Any, sampled: Callable[..., list[Any]]
) -> None:
    """z of all heads, in the two tiers together; of the other activations some units, in layers of every depth."""
    units = patched_units(smollm2, activation)
    if activation == "z":
        chosen = sampled(units, SAMPLED_HEADS)
    else:
        chosen = [units[number] for number in sorted(np.random.default_rng(0).permutation(len(units))[:UNITS])]
    index = pd.DataFrame([index_of(unit, activation) for unit in chosen], columns=["layer", "head"])
    for number, pair in enumerate(pairs):  # each with a part of the units
        pair_runs = PairRuns(smollm2, pair, "logit_diff", memory_bytes=2**30)
        with pair_runs.capturing():
            runs = [pair_runs.patch(activation, "denoising", [unit]) for unit in chosen[number::PAIRS]]
            values = pair_runs.evaluate("denoising", runs)
        assert_equal(pair_runs, values, patched_by_lens(bridge, pair, FUNCTIONS[activation], index[number::PAIRS]))


@pytest.mark.exhaustive(sample=2)
@torch.no_grad()
@pytest.mark.parametrize("activation", POSITION_FUNCTIONS)
def test_patches_of_one_position_equal_those_of_transformer_lens(
    smollm2: Model, bridge: Any, pairs: list[PairTokens], activation: Any
) -> None:
    pair, rng = pairs[0], np.random.default_rng(1)
    changed = int(torch.nonzero(pair.clean[0] != pair.corrupted[0])[0])
    units = patched_units(smollm2, activation)
    chosen = [units[number] for number in sorted(rng.permutation(len(units))[:POSITION_UNITS])]
    at = rng.integers(changed, pair.aligned, len(chosen)).tolist()
    index = pd.DataFrame([index_of(unit, activation) for unit in chosen], columns=["layer", "head"]).assign(pos=at)
    columns = ["layer", "head", "pos"] if activation == "pattern" else ["layer", "pos", "head"]
    pair_runs = PairRuns(smollm2, pair, "logit_diff", memory_bytes=2**30)
    with pair_runs.capturing():
        runs = [
            pair_runs.patch(activation, "denoising", [unit], range(position, position + 1))
            for unit, position in zip(chosen, at, strict=True)
        ]
        values = pair_runs.evaluate("denoising", runs)
    assert_equal(pair_runs, values, patched_by_lens(bridge, pair, POSITION_FUNCTIONS[activation], index[columns]))


@torch.no_grad()
def test_patches_of_pattern_entries_equal_those_of_transformer_lens(
    smollm2: Model, bridge: Any, pairs: list[PairTokens]
) -> None:
    pair, at = pairs[0], pairs[0].aligned - 1
    changed = int(torch.nonzero(pair.clean[0] != pair.corrupted[0])[0])
    heads, places = [(17, 4), (23, 3)], [(at, changed), (changed, 0), (at, at)]
    pair_runs = PairRuns(smollm2, pair, "logit_diff", memory_bytes=2**30)
    units = [head_unit(smollm2.geometry, layer, head) for layer, head in heads]
    with pair_runs.capturing():
        runs = [pair_runs.patch_entry("denoising", unit, *place) for unit in units for place in places]
        values = pair_runs.evaluate("denoising", runs)
    rows = [(layer, head, *place) for layer, head in heads for place in places]
    index = pd.DataFrame(rows, columns=["layer", "head", "dest_pos", "src_pos"])
    cache, corrupted = activation_cache(bridge, pair.clean), pair.corrupted[:, :-1]
    difference, edit = logit_difference_of(pair), lens.layer_head_dest_src_pos_pattern_patch_setter
    expected = lens.generic_activation_patch(
        bridge, corrupted, cache, difference, edit, "pattern", index_axis_names=None, index_df=index
    )
    assert_equal(pair_runs, values, expected.numpy())


@torch.no_grad()
def test_patches_of_layers_equal_those_of_transformer_lens(
    smollm2: Model, bridge: Any, pairs: list[PairTokens], sampled: Callable[..., list[Any]]
) -> None:
    """Every layer, at the first token that differs and at the last one: the rows of `get_act_patch_block_every`."""
    pair = pairs[0]
    positions = int(torch.nonzero(pair.clean[0] != pair.corrupted[0])[0]), pair.aligned - 1
    layers = sorted({*LARGE_EFFECTS, *sampled(range(smollm2.geometry.layers), SAMPLED_LAYERS)})
    spans = [range(at, at + 1) for at in positions]
    index = pd.DataFrame([(layer, at) for layer in layers for at in positions], columns=["layer", "pos"])
    pair_runs = PairRuns(smollm2, pair, "logit_diff", 2**30, inspect_layer_parts(smollm2, pair.clean))
    scale = abs(pair_runs.clean_value - pair_runs.corrupted_value)
    for activation in PART_NAMES:
        expected = patched_by_lens(bridge, pair, LAYER_FUNCTIONS[activation], index)
        with pair_runs.capturing():
            runs = [pair_runs.patch_part(activation, "denoising", layer, span) for layer in layers for span in spans]
            values = pair_runs.evaluate("denoising", runs)
        assert np.abs(np.array(values) - pair_runs.corrupted_value).max() > 0.1 * scale
        np.testing.assert_allclose(values, expected, atol=LAYER_TOLERANCE * scale, rtol=0)


@torch.no_grad()
def test_paths_through_queries_equal_direct_path_patching_of_transformer_lens(
    smollm2: Model, bridge: Any, pairs: list[PairTokens]
) -> None:
    """transformer-lens recomputes the norm before the receiver, and takes k and v only without KV groups."""
    sender, heads, layers = (27, 1), smollm2.geometry.heads, smollm2.geometry.layers
    paths = [Path(sender, ((layer, head),), "q") for layer in range(sender[0] + 1, layers) for head in range(heads)]
    for pair in pairs[1:]:
        clean, corrupted = (activation_cache(bridge, ids) for ids in (pair.clean, pair.corrupted))
        expected = lens.get_act_patch_direct_path(
            bridge, pair.corrupted[:, :-1], clean, corrupted, logit_difference_of(pair), *sender, verbose=False
        )
        pair_runs = PairRuns(smollm2, pair, "logit_diff", memory_bytes=2**30)
        with pair_runs.capturing():
            patching = PathPatching(pair_runs, inspect_paths(smollm2, pair.clean), "denoising", "recomputed")
            values = dict(patching.patch(paths))
        np.testing.assert_allclose(
            [values[path] for path in paths], [expected[path.receivers[0]] for path in paths], atol=TOLERANCE, rtol=0
        )
