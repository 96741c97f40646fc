"""Gemma 4 in its published layouts, tiny: audio and vision towers, and layers that differ in KV groups and head_dim."""

from typing import Any

import pytest
import torch
from support.whole_model import loss_without_head
from torch import nn
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, PreTrainedModel
from zoo import build, checks

import headscope as hs
from headscope.forward.interventions import ABLATIONS, head_units, layer_output_edit
from headscope.forward.replay import Replay
from headscope.positions.model import Model
from headscope.study.executor import describe_geometry
from probes.measure.run import measure_tokens

pytestmark = pytest.mark.slow  # many models

IDS = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(0))
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
UNEQUAL_GROUPS = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "E2B": (
        {"num_key_value_heads": 1, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 128, "use_double_wide_mlp": True},
        AUDIO,
    ),
    "E4B": (
        {"num_key_value_heads": 2, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 128},
        AUDIO,
    ),
    "26B-A4B": ({"hidden_size_per_layer_input": 0} | UNEQUAL_GROUPS | MIXTURE, None),
    "31B": ({"hidden_size_per_layer_input": 0} | UNEQUAL_GROUPS, None),
}
"""What each layout adds to TEXT, and its audio tower."""


def build_layout(name: str) -> PreTrainedModel:
    text, audio = LAYOUTS[name]
    vision = VISION | {"num_key_value_heads": 2}
    torch.manual_seed(0)
    config = Gemma4Config(text_config=TEXT | text, vision_config=vision, audio_config=audio)
    module = Gemma4ForConditionalGeneration(config).eval()
    module.set_attn_implementation({"text_config": "eager"})
    build.redraw(module.model.language_model)
    return module


def interrupt_capture(model: Model) -> None:
    """Run the model and interrupt it at its first attention layer."""

    def interrupt(record: Any) -> None:
        raise KeyboardInterrupt

    with hs.capturing(model) as layers:
        layers.listen(interrupt)
        model.module(input_ids=IDS)


def configurations(module: nn.Module) -> list[tuple[str, Any]]:
    """Every part's configuration and attention implementation."""
    parts = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    return [(part.config.to_json_string(use_diff=False), part.config._attn_implementation) for part in parts]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_is_measured_like_its_eager_attention(layout: str) -> None:
    verdict = checks.check_model(lambda: build_layout(layout))
    assert verdict.kind == "right without pairs", verdict


@pytest.mark.parametrize("layout", ["E2B", "31B"])
def test_a_model_in_memory_is_left_as_it_came(layout: str) -> None:
    module = build_layout(layout)
    before, weights = configurations(module), {name: t.clone() for name, t in module.state_dict().items()}
    model = hs.load(module)
    assert configurations(module) == before
    measure_tokens(model, IDS[0], ["attention", "nll"], 16)
    assert configurations(module) == before

    with pytest.raises(KeyboardInterrupt):
        interrupt_capture(model)
    assert configurations(module) == before
    after = module.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights.items())


def test_layers_with_other_kv_groups_are_stored_with_their_own() -> None:
    model = hs.load(build_layout("31B"))
    assert model.geometry.layer_kv_groups == (2, 2, 1, 2, 2, 1)
    assert describe_geometry(model)["layer_kv_groups"] == (2, 2, 1, 2, 2, 1)
    table = measure_tokens(model, IDS[0], ["attention"], None)["attention"]
    for layer, groups in enumerate(model.geometry.layer_kv_groups):
        in_layer = table["layer"] == layer
        assert (table["kv_group"][in_layer] == table["head"][in_layer] // (4 // groups)).all()


@pytest.mark.parametrize("layout", ["26B-A4B", "31B"])
def test_replayed_ablation_equals_ablation_in_the_whole_model(layout: str) -> None:
    model = hs.load(build_layout(layout))
    replay = Replay(model, model.schedule, IDS[:, :20], memory_bytes=1e9)
    with replay.running():
        replay.record_streams()
        for unit in head_units(model.geometry)[::7]:
            edits = {unit.layer: layer_output_edit(ABLATIONS["zero"], [unit], model.geometry)}
            replayed = float(replay.losses(edits).double().sum())
            assert replayed == pytest.approx(loss_without_head(model, unit, IDS[:, :20]), rel=1e-5)
