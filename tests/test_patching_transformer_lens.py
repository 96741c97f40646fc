"""Activation patching of the real model equals that of transformer-lens, which patches L x L caches."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformer_lens import patching as lens
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import headscope as hs
from headscope.forward.patching import GROUP_ACTIVATIONS, PairTokens, PatchingReplay, patched_units
from headscope.positions.model import Model
from headscope.prompts.pair_sets import generated_pairs

pytestmark = [pytest.mark.model, pytest.mark.slow]

TOLERANCE = 1e-3
"""Of the logit difference between the two runs of a pair."""
PAIRS, UNITS = 2, 24
FUNCTIONS = {
    "z": lens.get_act_patch_attn_head_out_all_pos,
    "q": lens.get_act_patch_attn_head_q_all_pos,
    "k": lens.get_act_patch_attn_head_k_all_pos,
    "v": lens.get_act_patch_attn_head_v_all_pos,
    "pattern": lens.get_act_patch_attn_head_pattern_all_pos,
}


@pytest.fixture(scope="module")
def bridge() -> Any:
    """A bridge over a second copy of the checkpoint, since a bridge changes the module that it wraps."""
    module = hs.load("smollm2-135m", device="cpu").module
    return build_bridge_from_module(module, type(module).__name__, hf_config=module.config)


@pytest.fixture(scope="module")
def pairs(smollm2: Model) -> list[PairTokens]:
    generated = generated_pairs("ioi", smollm2.tokenizer, PAIRS, 0, 0)
    built = (generated.build(number) for number in range(PAIRS))
    return [
        PairTokens(
            *(torch.tensor([[*prompt, *pair.answer]]).long() for prompt in (pair.clean, pair.corrupted)),
            *(torch.from_numpy(answer).long() for answer in (pair.answer, pair.wrong)),
            pair.aligned,
        )
        for pair in built
    ]


@torch.no_grad()
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_patches_equal_those_of_transformer_lens(
    smollm2: Model, bridge: Any, pairs: list[PairTokens], activation: Any
) -> None:
    units = patched_units(smollm2, activation)
    chosen = [units[number] for number in sorted(np.random.default_rng(0).permutation(len(units))[:UNITS])]
    index = [(unit.layer, unit.kv_group if activation in GROUP_ACTIVATIONS else unit.head) for unit in chosen]
    for pair in pairs:
        clean, corrupted = pair.clean[:, :-1], pair.corrupted[:, :-1]
        _, cache = bridge.run_with_cache(clean)
        expected = FUNCTIONS[activation](
            bridge,
            corrupted,
            cache,
            lambda logits, pair=pair: logits[0, -1, pair.answer[0]] - logits[0, -1, pair.wrong[0]],
            index_axis_names=None,
            index_df=pd.DataFrame(index, columns=["layer", "head"]),
        )
        replay = PatchingReplay(smollm2, pair, "logit_diff", memory_bytes=2**30)
        with replay.running():
            values = [value for _, _, value in replay.patch(activation, "denoising", chosen, [None])]
        scale = abs(replay.clean_value - replay.corrupted_value)
        assert np.abs(np.array(values) - replay.corrupted_value).max() > 1e-3 * scale
        np.testing.assert_allclose(values, expected.numpy(), atol=TOLERANCE * scale, rtol=0)
