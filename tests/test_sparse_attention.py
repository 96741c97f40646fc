"""Attention to keys that an indexer chose: measured where it chooses all keys, refused with the number beyond that."""

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.build import tiny

import headscope as hs
from headscope.errors import UnsupportedModel
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from probes.measure.run import measure_tokens

pytestmark = pytest.mark.slow  # many models

IDS = torch.randint(3, 120, (1, 24), generator=torch.Generator().manual_seed(1))
BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_block_size": 8, "index_topk_blocks": 2}
SPARSE: dict[str, dict[str, Any]] = {
    **{name: {"index_topk": 16} for name in ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")},
    "minimax_m3_vl_text": BLOCKS | {"index_head_dim": 32},
}
"""Each chooses 16 keys."""


def decoded(module: Any, ids: Tensor, prompt: int) -> Tensor:
    """Logits [1, L, V] of a prompt that is read at once and tokens that follow one by one."""
    with torch.no_grad():
        output = module(input_ids=ids[:, :prompt], use_cache=True)
        logits = [output.logits]
        for token in (ids[:, at : at + 1] for at in range(prompt, ids.shape[1])):
            output = module(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("model_type", SPARSE)
def test_sparse_attention_is_measured_up_to_the_chosen_keys_and_refused_beyond(model_type: str) -> None:
    module = tiny(model_type, SPARSE[model_type])
    with torch.no_grad():
        expected = module(input_ids=IDS[:, :16], use_cache=False).logits
        whole = module(input_ids=IDS, use_cache=False).logits
    model = hs.load(module)
    with hs.capturing(model):
        for logits in (decoded(module, IDS[:, :16], 16), decoded(module, IDS[:, :16], 10)):
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        for prompt in (17, 16):
            with pytest.raises(
                UnsupportedModel, match=r"only to 16 keys that an indexer chose. Use texts of at most 16"
            ):
                decoded(module, IDS[:, :17], prompt)
    with pytest.raises(
        UnsupportedModel, match=rf"this {module.config.model_type} model: each query attends only to 16"
    ):
        measure_tokens(model, IDS[0], ["attention"], None)
    with torch.no_grad():
        assert torch.equal(module(input_ids=IDS, use_cache=False).logits, whole)


def test_doge_is_refused_where_it_drops_keys() -> None:
    model = hs.load(tiny("doge", {"keep_window_size": 16}))
    assert len(measure_tokens(model, IDS[0, :16], ["attention", "pairs"], None)["attention"]["ess2"]) > 0
    with pytest.raises(UnsupportedModel, match=r"the 16 keys of highest bias. Use texts of at most 16 tokens"):
        measure_tokens(model, IDS[0, :17], ["attention"], None)


def test_padding_is_refused_where_it_shifts_blocks_of_keys() -> None:
    model = hs.load(tiny("minimax_m3_vl_text", SPARSE["minimax_m3_vl_text"]))
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, :3] = 0
    with hs.capturing(model), pytest.raises(UnsupportedModel, match="Pass one sequence at a time"):
        model.module(input_ids=IDS[:, :12], attention_mask=mask, use_cache=False)


def test_layers_that_rotate_for_an_indexer_do_not_count_as_sharing_keys() -> None:
    for model_type in ("glm_moe_dsa", "minimax_m3_vl_text"):
        assert not hs.load(tiny(model_type)).rotation.shares_keys
    assert hs.load(tiny("gemma3n_text")).rotation.shares_keys


def test_adarope_keeps_the_rotation_of_an_indexer_with_other_heads() -> None:
    """Two heads of the indexer, four KV groups."""
    model = hs.load(tiny("deepseek_v32"))
    yarn = resolve_schedule(model, "yarn:factor=4")
    ids, logits = IDS[:, :12], []
    for scheme in (yarn, AdaRoPE.from_schedule(model, yarn)):
        with hs.attached(model, scheme), torch.no_grad():
            logits.append(model.module(input_ids=ids, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=2e-5 * float(logits[0].abs().max()))


def test_cross_attention_layers_are_skipped() -> None:
    module = tiny("mllama")
    cross = module.config.get_text_config().cross_attention_layers
    layers = module.config.get_text_config().num_hidden_layers
    numbers = hs.load(module).geometry.layer_numbers
    assert cross
    assert numbers == tuple(layer for layer in range(layers) if layer not in cross)


def test_phi_moe_uses_its_own_factor_and_refuses_pairs_beyond_its_original_length() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1 + 0.5 * pair for pair in range(8)],
        "short_mscale": 1.243163121016122,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 16,
    }
    model = hs.load(tiny("phimoe", {"rope_parameters": longrope, "head_dim": 16}))
    assert model.rotation.factors == pytest.approx([1.243163121016122] * model.geometry.layers, rel=1e-5)
    measure_tokens(model, IDS[0, :16], ["attention", "pairs"], None)
    with pytest.raises(UnsupportedModel, match=r"beyond 16 tokens .* Use texts of at most 16 tokens"):
        measure_tokens(model, IDS[0], ["pairs"], None)
