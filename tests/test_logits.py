"""Losses come from the family's own head, whatever it uses from its backbone."""

from typing import Any

import pytest
import torch
import transformers
from support import eager_reference, families
from support.refusals import refuses

import headscope as hs
from headscope.errors import UnsupportedModel
from probes.measure.run import measure_tokens

IDS = torch.randint(3, families.VOCAB, (1, 40), generator=torch.Generator().manual_seed(5))
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 3.0},
}


@pytest.mark.parametrize("family", [*EXPERTS, "opt", "gemma2", "llama4", "gpt2"])
def test_the_loss_equals_that_of_the_models_own_head(family: str) -> None:
    """Heads that use router logits, an inner decoder, soft-capped logits, and a head without a prefix."""
    options = EXPERTS.get(family, {"word_embed_proj_dim": 64} if family == "opt" else None)
    module = families.OTHERS[family].build() if options is None else families.build(family, options)
    expected = eager_reference.nll_reference(module, IDS)
    columns = measure_tokens(hs.load(module), IDS[0], ["nll"], None)["nll"]
    mean = (columns["nll"] * columns["tokens"]).sum() / columns["tokens"].sum()
    assert mean == pytest.approx(expected.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "head", ["Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
)
def test_a_model_without_a_language_model_head_is_refused_when_it_is_loaded(head: str) -> None:
    module = getattr(transformers, f"AutoModel{head.removeprefix('Model')}").from_config(
        families.build("llama", {}).config
    )
    with refuses(UnsupportedModel, "(llama)", f"Llama{head}", "language-model"):
        hs.load(module)


def test_a_vision_model_is_refused_when_it_is_loaded() -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28)
    with refuses(UnsupportedModel, "(vit)", "ViTModel", "language-model"):
        hs.load(transformers.ViTModel(config))


def test_a_head_that_does_not_use_its_backbone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = families.build("llama", {})
    model = hs.load(module)
    forward = module.forward
    module.decoy = hs.load(families.build("llama", {})).module.model
    monkeypatch.setattr(module, "base_model_prefix", "decoy")
    assert forward(IDS).logits is not None
    with refuses(UnsupportedModel, f"'{model.name}'", "backbone"):
        measure_tokens(model, IDS[0], ["nll"], None)
