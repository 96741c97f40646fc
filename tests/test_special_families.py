"""What is special in families with chosen keys, cross-attention or own rotary factors, beside their attention."""

import pytest
import torch
from support.refusals import refuses
from zoo.build import tiny

import headscope as hs
from headscope.errors import UnsupportedModel
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from probes.measure.run import measure_tokens

pytestmark = pytest.mark.slow  # many models

IDS = torch.randint(3, 120, (1, 24), generator=torch.Generator().manual_seed(1))


def test_doge_is_refused_where_it_drops_keys() -> None:
    model = hs.load(tiny("doge", {"keep_window_size": 16}))
    assert len(measure_tokens(model, IDS[0, :16], ["attention", "pairs"], None)["attention"]["ess2"]) > 0
    with refuses(UnsupportedModel, "doge", "bias", 16):
        measure_tokens(model, IDS[0, :17], ["attention"], None)


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
    with refuses(UnsupportedModel, "phimoe", "frequencies", 16):
        measure_tokens(model, IDS[0], ["pairs"], None)
