"""At opening, a model whose attention is not what the seam computes is refused by name, whatever the reason."""

import sys
from typing import Any

import pytest
import torch
from support import families
from transformers import PreTrainedModel

import headscope as hs
from headscope.attention import backend, kernel
from headscope.attention.masks import DecodedMask
from headscope.errors import UnsupportedModel
from headscope.models import eager_check


def opened(module: PreTrainedModel) -> str:
    """What opening it says."""
    with pytest.raises(UnsupportedModel) as refused:
        hs.load(module)
    return str(refused.value)


@pytest.mark.parametrize(
    ("family", "lost"),
    [("gemma2", "cap"), ("gpt_oss", "sink"), ("gpt_oss", "window"), ("mistral-sliding", "window"), ("llama4", "chunk")],
)
def test_a_rule_that_would_be_lost_is_noticed(family: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where windows and chunks are far longer than the few tokens that are tried."""
    spec = families.SPECS.get(family) or families.OTHERS[family]
    long = {"sliding_window": 4096} if lost == "window" else {"attention_chunk_size": 8192} if lost == "chunk" else {}
    module = families.build(spec.model_type, spec.options | long)
    before = module.config.to_dict()
    hs.load(module)
    assert module.config.to_dict() == before
    complete = kernel.AttentionRule
    monkeypatch.setattr(backend, "AttentionRule", lambda *args, **kw: without(complete(*args, **kw), lost))
    assert f"cannot measure this {spec.model_type} model: attention in layer 0 differs from its own" in opened(module)


def without(rule: kernel.AttentionRule, name: str) -> kernel.AttentionRule:
    return kernel.AttentionRule(**{key: None if key == name else value for key, value in vars(rule).items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_family_that_attends_in_a_way_of_its_own_is_refused(
    layer: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = families.build("llama", {}).to(dtype)
    home = sys.modules[type(module).__module__]
    eager: Any = home.eager_attention_forward  # type: ignore[attr-defined]

    def tempered(attention: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any) -> Any:
        return eager(
            attention, q, k, v, mask, scaling=scaling * (0.7 if attention.layer_idx == layer else 1), **options
        )

    hs.load(module)
    monkeypatch.setattr(home, "eager_attention_forward", tempered)
    assert f"attention in layer {layer} differs from its own eager attention by" in opened(module)


@pytest.mark.parametrize("family", [*families.SPECS, *families.OTHERS])
def test_in_bfloat16_rounding_is_not_taken_for_another_attention(family: str) -> None:
    spec = families.SPECS.get(family) or families.OTHERS[family]
    hs.load(spec.build().bfloat16())


def test_the_model_is_left_as_it_was() -> None:
    module = families.SPECS["gemma3"].build().train()
    implementation, ids = module.config._attn_implementation, torch.arange(20)[None]
    with torch.no_grad():
        expected = module.eval()(ids).logits
    module.train()
    model = hs.load(module)
    assert module.training
    assert module.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    with torch.no_grad():
        assert torch.equal(module.eval()(ids).logits, expected)
    eager_check.check_against_eager(module, model.attention_modules, model.geometry.layer_numbers)


def test_a_mask_of_another_kind_is_refused_where_it_is_used() -> None:
    with pytest.raises(UnsupportedModel, match="4-D"):
        DecodedMask.decode(torch.zeros(1, 1, 3, 3))
