"""Eager check: a model whose eager attention differs from headscope's backend is refused when it is opened."""

import sys
from typing import Any

import pytest
import torch
from support import families
from support.refusals import assert_names, refuses
from transformers import PreTrainedModel

import headscope as hs
from headscope.attention import backend, kernel
from headscope.attention.masks import DecodedMask, UnsupportedMask
from headscope.errors import UnsupportedModel
from headscope.models import eager_check


def opening_error(module: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModel) as raised:
        hs.load(module)
    return str(raised.value)


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("gemma2", "softcap"),
        ("gpt_oss", "sink"),
        ("gpt_oss", "window"),
        ("mistral-sliding", "window"),
        ("llama4", "chunk_size"),
    ],
)
def test_ignored_attention_rule_is_detected(family: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if windows and chunks are far longer than the tokens of the check."""
    spec = families.SPECS.get(family) or families.OTHERS[family]
    long = (
        {"sliding_window": 4096}
        if field == "window"
        else {"attention_chunk_size": 8192}
        if field == "chunk_size"
        else {}
    )
    module = families.build(spec.model_type, spec.options | long)
    before = module.config.to_dict()
    hs.load(module)
    assert module.config.to_dict() == before
    rule_class = kernel.AttentionVariant
    monkeypatch.setattr(backend, "AttentionVariant", lambda *args, **kw: without(rule_class(*args, **kw), field))
    assert_names(opening_error(module), spec.model_type, "layer 0", "eager")


def without(rule: kernel.AttentionVariant, name: str) -> kernel.AttentionVariant:
    return kernel.AttentionVariant(**{key: None if key == name else value for key, value in vars(rule).items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [0, 3])
def test_different_eager_attention_is_refused(layer: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    module = families.build("llama", {}).to(dtype)
    namespace = sys.modules[type(module).__module__]
    eager: Any = namespace.eager_attention_forward  # type: ignore[attr-defined]

    def rescaled(attention: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **options: Any) -> Any:
        return eager(
            attention, q, k, v, mask, scaling=scaling * (0.7 if attention.layer_idx == layer else 1), **options
        )

    hs.load(module)
    monkeypatch.setattr(namespace, "eager_attention_forward", rescaled)
    assert_names(opening_error(module), "llama", f"layer {layer}", "eager")


@pytest.mark.parametrize("family", [*families.SPECS, *families.OTHERS])
def test_bfloat16_rounding_passes_the_check(family: str) -> None:
    spec = families.SPECS.get(family) or families.OTHERS[family]
    hs.load(spec.build().bfloat16())


def test_check_restores_the_model() -> None:
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


def test_dense_4d_mask_is_refused() -> None:
    with refuses(UnsupportedMask, "4-D", "2-D"):
        DecodedMask.decode(torch.zeros(1, 1, 3, 3))  # every key is visible
