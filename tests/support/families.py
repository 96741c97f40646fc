"""Tiny random models of many architectures: what headscope must measure, and what it must refuse.

Every builder is seeded and needs no network. Weights are drawn large, and norms and biases are perturbed, so
that attention is far from uniform and a forgotten bias or QK-norm shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

LAYERS, HEADS, VOCAB, WINDOW = 4, 4, 128, 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ABSENT = object()
"""As an option: leave this key of `COMMON` out. None is passed on, since it means something (no window)."""
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


@dataclass(frozen=True)
class Family:
    """One architecture: its transformers name, what differs from `COMMON`, and the geometry a reader should find."""

    model_type: str
    options: dict[str, Any]
    groups: int = 2
    head_dim: int = 16
    rotary_dims: int = 16
    layout: str = "half"
    windows: tuple[int | None, ...] = (None,) * LAYERS
    rotates: tuple[bool, ...] = (True,) * LAYERS
    numbers: tuple[int, ...] = tuple(range(LAYERS))
    rotary_start: int = 0

    def build(self, seed: int = 0) -> PreTrainedModel:
        return build(self.model_type, self.options, seed)


def build(model_type: str, options: dict[str, Any], seed: int = 0, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """Build a random float32 model in eval mode; `options` override `COMMON`."""
    settings = {key: value for key, value in (COMMON | options).items() if value is not ABSENT}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(AutoConfig.for_model(model_type, **settings), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms and biases: neither 1 nor 0
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if "q_norm" in name or "k_norm" in name:  # unit-norm queries would leave attention nearly flat
                    parameter.add_(0.8)
    return model


# Options stay away from defaults that coincide: head_dim 32 differs from hidden_size / heads, granite's and
# gemma's multipliers differ from head_dim ** -0.5, clip_qkv is small enough to clip.
SPECS: dict[str, Family] = {
    "llama": Family("llama", {"num_key_value_heads": 4}, groups=4),
    "llama-gqa": Family("llama", {}),
    "llama-mqa": Family("llama", {"num_key_value_heads": 1}, groups=1),
    "mistral-sliding": Family("mistral", {"sliding_window": WINDOW}, windows=(WINDOW,) * LAYERS),
    "mistral": Family("mistral", {"sliding_window": None}),
    "qwen2": Family("qwen2", {}),
    "qwen3": Family("qwen3", {"head_dim": 32}, head_dim=32, rotary_dims=32),
    "gemma3": Family(
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": ALTERNATING},
        head_dim=32,
        rotary_dims=32,
        windows=(WINDOW, None) * (LAYERS // 2),
    ),
    "olmo": Family("olmo", {"clip_qkv": 2.0}),
    "olmo2": Family("olmo2", {}),
    "olmo3": Family(
        "olmo3",
        {"sliding_window": WINDOW, "layer_types": ALTERNATING},
        windows=(WINDOW, None) * (LAYERS // 2),
    ),
    "phi": Family("phi", {}, rotary_dims=8),
    "phi3": Family("phi3", {"original_max_position_embeddings": 256}),
    "gpt_neox": Family("gpt_neox", {"num_key_value_heads": ABSENT}, groups=4, rotary_dims=4),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 1, 1, 0]}, rotates=(True, True, True, False)),
    "granite": Family("granite", {"attention_multiplier": 0.2}),
    "cohere": Family("cohere", {"logit_scale": 1.0}, layout="interleaved"),
    "glm": Family("glm", {"head_dim": 16}, rotary_dims=8, layout="interleaved"),
}

MEASURABLE: dict[str, Callable[[], PreTrainedModel]] = {name: family.build for name, family in SPECS.items()}

_MLA = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_MLA |= {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": LAYERS, "n_group": 1}
_MLA |= {"topk_group": 1, "num_key_value_heads": HEADS, "head_dim": 8}
_HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
_LATENT: dict[str, Any] = {"groups": 4, "head_dim": 24, "rotary_dims": 8, "rotary_start": 16}
_EVERY_OTHER: dict[str, Any] = {
    "numbers": (1, 3),
    "windows": (None,) * (LAYERS // 2),
    "rotates": (True,) * (LAYERS // 2),
}
_UNROTATED = {"rotary_dims": 0, "rotates": (False,) * LAYERS}

OTHERS: dict[str, Family] = {
    "gemma2": Family(
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "layer_types": ALTERNATING},
        head_dim=32,
        rotary_dims=32,
        windows=(WINDOW, None) * (LAYERS // 2),
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        windows=(WINDOW, None) * (LAYERS // 2),
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            "head_dim": 16,
            "layer_types": ALTERNATING,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 16,
        },
        windows=(WINDOW, None) * (LAYERS // 2),
    ),
    "llama4": Family(
        "llama4_text",
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0]},
        layout="interleaved",
        rotates=(True, True, True, False),
    ),
    "deepseek_v2": Family("deepseek_v2", _MLA, layout="interleaved", **_LATENT),
    "deepseek_v3": Family("deepseek_v3", _MLA, **_LATENT),
    "nanochat": Family("nanochat", {}),
    "qwen3_next": Family(
        "qwen3_next",
        {
            "head_dim": 16,
            "layer_types": _HYBRID,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        rotary_dims=4,
        **_EVERY_OTHER,
    ),
    "lfm2": Family(
        "lfm2",
        {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "block_auto_adjust_ff_dim": False},
        **_EVERY_OTHER,
    ),
    "jamba": Family(
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 2,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
        **_EVERY_OTHER | {"rotary_dims": 0, "rotates": (False,) * (LAYERS // 2)},
    ),
    "gpt2": Family(
        "gpt2", {"n_embd": 64, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 256}, groups=4, **_UNROTATED
    ),
    "hunyuan": Family("hunyuan_v1_dense", {"head_dim": 16}, **_UNROTATED),  # norms with weights after the rotation
}
"""Other ways to attend and to rotate: soft caps, sinks, rotation functions of other shapes, latent attention, layers
without attention, no rotation."""

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = MEASURABLE | {"gemma2": OTHERS["gemma2"].build}
"""Rotary families that transformers serves through its attention interface."""

_HALF = COMMON["hidden_size"] // HEADS // 2

DYNAMIC: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-dynamic": partial(
        build, "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "phi3-longrope": partial(
        build,
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * _HALF,
                "long_factor": [4.0] * _HALF,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
"""Models that turn a text longer than some length by other frequencies."""


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "bert": partial(build, "bert", {}, auto=AutoModelForMaskedLM),  # bidirectional, learned positions
    "openai-gpt": partial(
        build, "openai-gpt", {"n_head": HEADS, "n_layer": LAYERS, "n_embd": 64}
    ),  # own attention code
    "falcon-alibi": partial(build, "falcon", {"alibi": True}),  # one key head, whose bias differs by query head
    "mamba": partial(build, "mamba", {}),  # no attention at all
    "llama-bidirectional": partial(build, "llama", {"is_causal": False}),
    "gemma3-bidirectional": partial(
        build,
        "gemma3_text",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING, "use_bidirectional_attention": True},
    ),
}
"""Models that would be measured wrongly. Each builds and runs under transformers; headscope must say no by name."""
