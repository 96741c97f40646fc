"""Tiny models that are written as GGUF and opened again, and what their files say about positions.

`tests/test_gguf_positions.py` compares each with the model that it was made from; the table of docs/positions.md is
generated from the same data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from support import families

VOCAB = 300
"""More than the 257 tokens of the vocabulary that gguf_files writes."""
THETA = 10_000.0


def _rope(kind: str = "default", theta: float = THETA, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT, LONG = [1.0 + 0.1 * n for n in range(8)], [1.5 * 1.4**n for n in range(8)]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32}
PHI3 = {"pad_token_id": None, "original_max_position_embeddings": 128}
GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}
GEMMA3 = GEMMA | {"num_hidden_layers": 6}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 10.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 2e6, "partial_rotary_factor": 0.25},
    },
}
GEMMA4_KEYS = (
    *("attention.sliding_window", "attention.sliding_window_pattern"),
    *("attention.key_length_swa", "rope.dimension_count", "rope.dimension_count_swa", "final_logit_softcapping"),
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR_ATTENTION = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **_rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
}


@dataclass(frozen=True)
class Case:
    """A model as `families.build` takes it, the keys that it checks, and settings that llama.cpp would not write."""

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 0) -> PreTrainedModel:
        return build(self.model_type, dict(self.options), seed)


def build(model_type: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A tiny random model, with weights that GGUF stores without rounding."""
    model = families.build(model_type, {"vocab_size": VOCAB, "max_position_embeddings": 128, **options}, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for _ in range(20 if name.endswith("A_log") else 0):  # stored as -exp(A_log)
                parameter.copy_(parameter.exp().log())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.75)
    return model


BASE = ("rope.freq_base", "rope.dimension_count")
WINDOW = ("attention.sliding_window",)
YARN_FACTOR = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
CASES = {
    # the six of the report
    "Llama 3.1": Case("llama", _rope("llama3", **LLAMA3), ("rope_freqs.weight", *BASE)),
    "Llama, linear 4": Case("llama", _rope("linear", factor=4.0), ("rope.scaling.type", "rope.scaling.factor")),
    "Qwen2, YaRN 4": Case("qwen2", _rope("yarn", **YARN), YARN_FACTOR),
    "Phi-3, LongRoPE": Case(
        "phi3",
        PHI3 | {"original_max_position_embeddings": 32} | _rope("longrope", **LONGROPE),
        ("rope_factors_short.weight", "rope_factors_long.weight", *YARN_FACTOR[2:], "rope.scaling.attn_factor"),
    ),
    "Gemma 3, linear 8 on global layers": Case(
        "gemma3_text",
        GEMMA3
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
        ("rope.freq_base", "rope.freq_base_swa", *YARN_FACTOR[:2], *WINDOW),
    ),
    "Phi-3, window": Case("phi3", PHI3 | {"sliding_window": 24}, WINDOW),
    # every architecture
    "Llama": Case("llama", _rope(theta=5e5), BASE),
    "Llama, biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "Mistral": Case("mistral", {"sliding_window": None}),
    "Qwen2": Case("qwen2", _rope(theta=1e6), ("rope.freq_base",)),
    "Qwen2-MoE": Case("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "Qwen3": Case("qwen3", {"head_dim": 32}, ("attention.key_length",)),
    "Qwen3-MoE": Case("qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "Qwen3.5": Case("qwen3_5_text", LINEAR_ATTENTION, ("rope.dimension_count", "rope.dimension_sections")),
    "Qwen3.5-MoE": Case("qwen3_5_moe_text", LINEAR_ATTENTION | EXPERTS | {"shared_expert_intermediate_size": 48}),
    "Phi-4-mini, rotates 3/4": Case("phi3", PHI3 | _rope(partial_rotary_factor=0.75), BASE),
    "Gemma 2": Case(
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        (*WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "Gemma 3": Case("gemma3_text", GEMMA3, WINDOW),
    "Gemma 4": Case(
        "gemma4_text",
        GEMMA4,
        ("rope.freq_base", "rope.freq_base_swa", "rope_freqs.weight", *GEMMA4_KEYS),
    ),
    "Gemma 4, unequal layers": Case(
        "gemma4_text",
        GEMMA4
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "StarCoder2": Case("starcoder2", _rope(theta=5_000.0), ("rope.freq_base",)),
    "StableLM, rotates 1/4": Case("stablelm", _rope(partial_rotary_factor=0.25, theta=2_000.0), BASE),
    "Nemotron, rotates 1/2": Case("nemotron", {"head_dim": 16}, BASE),
    "Falcon": Case("falcon"),
    "BLOOM": Case("bloom", {"n_layer": 4, "n_head": 4}),
    "GPT-2": Case("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "n_inner": 96}),
    "LFM2": Case("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}),
    "MiniMax-M2": Case(
        "minimax_m2",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        ("rope.dimension_count",),
    ),
}
"""Models whose GGUF, opened by headscope, gives the logits of the model."""
VARIANTS = {
    "Gemma 3, every second layer": Case(
        "gemma3_text",
        GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"] * 3},
        ("attention.sliding_window_pattern",),
        {"attention.sliding_window_pattern": 2},
    ),
    "Gemma 3, softmax scale": Case(
        "gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 64}, ("attention.scale",), {"attention.scale": 0.125}
    ),
    "StableLM, rotates 1/2": Case("stablelm", _rope(partial_rotary_factor=0.5), BASE),
    "Llama, factors of no formula": Case(
        "llama", _rope("longrope", **LONGROPE | {"long_factor": SHORT, "attention_factor": 1.0}), ("rope_freqs.weight",)
    ),
    "Llama, 3.1 published factors": Case(
        "llama", _rope("llama3", 5e5, **LLAMA3 | {"original_max_position_embeddings": 8192}), ("rope_freqs.weight",)
    ),
    "Llama, YaRN with all parameters": Case(
        "llama",
        _rope("yarn", **YARN, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0),
        tuple(f"rope.scaling.yarn_{name}" for name in ("attn_factor", "beta_fast", "beta_slow")),
    ),
    "Llama, YaRN with multiplier": Case(
        "llama",
        _rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5),
        ("rope.scaling.yarn_log_multiplier",),
        {"rope.scaling.yarn_log_multiplier": 0.5},
    ),
    "Llama, YaRN with attn_factor": Case(
        "llama",
        _rope("yarn", **YARN, attention_factor=1.5 * (1 + 0.1 * 1.3862943611198906)),
        ("rope.scaling.attn_factor",),
        {"rope.scaling.attn_factor": 1.5, "rope.scaling.yarn_attn_factor": None},
    ),
    "Llama, linear without a type": Case(
        "llama", _rope("linear", factor=4.0), ("rope.scaling.factor",), {"rope.scaling.type": None}
    ),
    "Llama, old name of linear scaling": Case(
        "llama",
        _rope("linear", factor=4.0),
        ("rope.scale_linear",),
        {"rope.scaling.type": None, "rope.scaling.factor": None, "rope.scale_linear": 4.0},
    ),
    "Gemma 3, Ollama's names": Case(
        "gemma3_text",
        GEMMA3
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 2e6},
            }
        },
        ("rope.global.freq_base", "rope.local.freq_base"),
        {
            "rope.freq_base": None,
            "rope.freq_base_swa": None,
            "rope.global.freq_base": 2e6,
            "rope.local.freq_base": 5_000.0,
        },
    ),
}
"""Further ways to state positions: the configuration of the GGUF, with the weights of the model, gives its logits."""

MEANINGS = {
    "rope.freq_base": "base of the frequencies; 10,000 without it",
    "rope.global.freq_base": "the same, as Ollama writes it",
    "rope.freq_base_swa": "base in layers with a window (Gemma 3 and 4); 10,000 without it",
    "rope.local.freq_base": "the same, as Ollama writes it",
    "rope.dimension_count": "dimensions of a head that rotate; all without it",
    "rope.dimension_count_swa": "the same in layers with a window (Gemma 4): the whole head",
    "rope.dimension_sections": "pairs of each axis of a text with images (Qwen 3.5)",
    "rope.scaling.type": "`none`, `linear`, `yarn` or `longrope`; `linear` if only a factor is there",
    "rope.scaling.factor": "factor of linear scaling or YaRN",
    "rope.scale_linear": "the same for linear scaling, in old files",
    "rope.scaling.original_context_length": "length before scaling; `context_length` without it",
    "rope.scaling.attn_factor": "factor on cos and sin, times the default of YaRN",
    "rope.scaling.yarn_attn_factor": "factor on cos and sin itself",
    "rope.scaling.yarn_log_multiplier": "`mscale_all_dim` of YaRN, with `mscale` 1",
    "rope.scaling.yarn_ext_factor": "1; transformers cannot blend in part",
    "rope.scaling.yarn_beta_fast": "turns above which YaRN keeps a frequency; 32 without it",
    "rope.scaling.yarn_beta_slow": "turns below which YaRN divides a frequency; 1 without it",
    "rope.scaling.finetuned": "nothing: it changes no number",
    "rope_freqs.weight": "divisor of each frequency: `llama3` or `longrope` with these; `proportional` (Gemma 4)",
    "rope_factors_short.weight": "divisor of each frequency in texts up to the original length (LongRoPE)",
    "rope_factors_long.weight": "divisor of each frequency in longer texts (LongRoPE)",
    "attention.sliding_window": "tokens that a layer with a window attends to; 0 is none",
    "attention.sliding_window_pattern": "layers with a window; without it llama.cpp's for the architecture",
    "attention.scale": "factor on the logits; head_dim^-1/2 without it, 1 for Gemma 4",
    "attention.key_length": "dimensions of a head; hidden size / heads without it",
    "attention.key_length_swa": "the same in layers with a window (Gemma 4)",
    "block_count": "layers; Gemma 2 with 46 and Gemma 3 with 62 scale logits by (hidden size / heads)^-1/2",
    "attn_logit_softcapping": "soft cap of the attention logits",
    "final_logit_softcapping": "soft cap of the logits of tokens",
}
"""What headscope reads from each setting of positions, windows and temperature, for docs/positions.md."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "rope.scaling.type": ("Llama, linear 4", {"rope.scaling.type": "dynamic"}),
    "rope.scaling.alpha": ("Llama", {"rope.scaling.alpha": 2.0}),
    "rope.scaling.yarn_ext_factor": ("Qwen2, YaRN 4", {"rope.scaling.yarn_ext_factor": 0.5}),
    "rope.scaling.yarn_beta_fast": ("Llama, linear 4", {"rope.scaling.yarn_beta_fast": 16.0}),
    "rope.scaling.attn_factor": ("Llama, linear 4", {"rope.scaling.attn_factor": 1.2}),
    "rope.dimension_count": ("Llama 3.1", {"rope.dimension_count": 8}),
    "rope.dimension_sections": ("Qwen2", {"rope.dimension_sections": [2, 3, 3, 0]}),
    "rope.freq_base": ("GPT-2", {"rope.freq_base": 10_000.0}),
    "rope.freq_base_swa": ("Llama", {"rope.freq_base_swa": 5_000.0}),
    "rope.local.freq_base": ("Gemma 3", {"rope.local.freq_base": 5_000.0}),
    "rope.scale_linear": ("Llama, linear 4", {"rope.scale_linear": 8.0}),
    "attention.sliding_window": ("Mistral", {"attention.sliding_window": 24}),
    "attention.sliding_window_pattern": ("Phi-3, window", {"attention.sliding_window_pattern": [True, False] * 2}),
    "attention.scale": ("Qwen2", {"attention.scale": 0.5}),
    "attention.clamp_kqv": ("Llama", {"attention.clamp_kqv": 8.0}),
    "attention.temperature_scale": ("Llama", {"attention.temperature_scale": 0.1}),
    "attention.causal": ("Llama", {"attention.causal": False}),
    "attention.value_length": ("Llama", {"attention.value_length": 8}),
    "logit_scale": ("Llama", {"logit_scale": 0.5}),
    "attn_logit_softcapping": ("Llama", {"attn_logit_softcapping": 30.0}),
}
"""Settings that transformers cannot express there: the case whose file they are added to, and their values."""
