"""The identity of a model: what differs is named, what has changed is noticed, and nothing is said beyond the record."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_studies import save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import headscope as hs


def tiny(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    return LlamaForCausalLM(LlamaConfig(**{**shape, **heads, **settings})).eval()


def zero_output(module: Any, args: Any, output: Any) -> Any:
    return output * 0


def scaled(factor: float) -> LlamaForCausalLM:
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= factor
    return model


def hooked() -> LlamaForCausalLM:
    model = tiny()
    model.model.layers[1].mlp.register_forward_hook(zero_output)
    return model


def replaced() -> LlamaForCausalLM:
    model = tiny()
    model.model.layers[1].mlp.forward = lambda x: x * 0
    return model


def retempered() -> LlamaForCausalLM:
    model = tiny()
    model.model.layers[0].self_attn.scaling *= 2
    return model


OTHER_MODELS: dict[str, tuple[Callable[[], LlamaForCausalLM], str]] = {
    "theta": (lambda: tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_theta"),
    "linear scaling": (
        lambda: tiny(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        "rope_type default against linear",
    ),
    "eps": (lambda: tiny(rms_norm_eps=1e-3), "rms_norm_eps 1e-06 against 0.001"),
    "rounding": (lambda: scaled(1.0009), "weights"),
    "hook": (hooked, "hooks"),
    "replaced forward": (replaced, "hooks"),
    "temperature": (retempered, "constants of modules (scaling"),
    "dtype": (lambda: tiny().double(), "dtype (float32 against float64)"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_comparison_names_what_differs(name: str) -> None:
    build, phrase = OTHER_MODELS[name]
    comparison = hs.load(tiny()).identity.compare(hs.load(build()).identity)
    assert comparison.has_equal_weights or name == "rounding"
    assert any(phrase in difference for difference in comparison.differences), comparison
    assert not comparison.unknown
    assert not hs.load(build()).identity.compare(hs.load(build()).identity).differences
