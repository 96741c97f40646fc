"""What a checkpoint of a family may have and the family's defaults do not show."""

from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import build, sizes

WINDOWED = {"sliding_attention", "full_attention"}
LLAMAS = ("llama", "qwen2", "mistral", "gemma", "olmo2", "phi3", "gpt_neox", "granite", "cohere", "qwen3_moe")
_HALF = sizes.HIDDEN // sizes.HEADS // 2
_LONG = {"short_factor": [1.0] * _HALF, "long_factor": [1.0 + 0.5 * f for f in range(_HALF)]}
_ORIGINAL = {"original_max_position_embeddings": sizes.ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0} | _ORIGINAL,
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | _ORIGINAL,
    "dynamic": {"factor": 2.0} | _ORIGINAL,
    "longrope": {"factor": 2.0} | _ORIGINAL | _LONG,
}
"""Ways of transformers to reach beyond the native context."""


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each (model type, what is varied, changes to its tiny config)."""
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        yield from _windows(name)
    for name in LLAMAS:
        tied = _default(name).tie_word_embeddings
        yield name, "untied" if tied else "tied", {"tie_word_embeddings": not tied}
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "olmo3", "granite", "starcoder2"):
        for groups, description in ((sizes.HEADS, "a key head each"), (1, "one key head")):
            yield name, description, {"num_key_value_heads": groups}
    for name in ("phi", "phi3", "glm", "glm4", "gpt_neox", "nemotron", "persimmon", "stablelm", "qwen3_next"):
        yield name, "half of the dimensions rotate", {"rope_parameters": _rope(partial_rotary_factor=0.5)}
    for name in ("gemma3_text", "modernbert-decoder", "olmo3"):
        two = {"sliding_attention": _rope(rope_theta=300.0), "full_attention": _rope()}
        rope = two if "full_attention" in (_default(name).rope_parameters or {}) else _rope(rope_theta=300.0)
        yield name, "another base", {"rope_parameters": rope}
    for name in ("persimmon", "phi", "stablelm"):
        yield name, "norms on q and k", {"qk_layernorm": not _default(name).qk_layernorm}
    for name in ("cohere", "glm4_moe", "llama4_text"):
        yield name, "norms on q and k", {"use_qk_norm": not _default(name).use_qk_norm}
    for name in ("llama", "qwen2", "qwen3", "mistral"):
        for kind, parameters in ROPES.items():
            rope = {"rope_type": kind, "rope_theta": 10_000.0} | parameters
            reach = {"max_position_embeddings": sizes.ORIGINAL} if kind == "dynamic" else {}
            yield name, kind, {"rope_parameters": rope, "head_dim": sizes.HIDDEN // sizes.HEADS} | reach
    for name, description, changes in ODD:
        yield name, description, changes


ODD: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bloom", "six heads", {"n_head": 6, "hidden_size": 96}),
    ("falcon", "two key heads", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", "a key head each", {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("gpt2", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_bigcode", "a key head each", {"multi_query": False}),
    ("gpt_neox", "attention before the feed-forward", {"use_parallel_residual": False}),
    ("opt", "norms after the layers", {"do_layer_norm_before": False}),
    ("olmo", "clipped q, k and v", {"clip_qkv": 0.8}),
    ("llama", "biases", {"attention_bias": True}),
    ("smollm3", "rotation in one layer", {"no_rope_layers": [0, 1, 0, 0]}),
    ("gemma2", "a narrow cap", {"attn_logit_softcapping": 2.0}),
    ("qwen3", "wide heads", {"head_dim": 48}),
    ("gpt_oss", "full layers alone", {"layer_types": ["full_attention"] * 4}),
    ("granitemoehybrid", "rotation", {"position_embedding_type": "rope"}),
    ("zamba2", "rotation", {"use_mem_rope": True}),
    ("minimax_m3_vl_text", "full layers alone", {"layer_types": ["full_attention"] * 4}),
    ("deepseek_v3", "no compressed queries", {"q_lora_rank": None}),
    ("deepseek_v3", "half-split rotation", {"rope_interleave": False}),
    ("deepseek_v3", "wide values", {"v_head_dim": 40}),
)


def _default(name: str) -> Any:
    return CONFIG_MAPPING[name]().get_text_config()


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0} | parameters


def _windows(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Sliding windows on, in layers that alternate where they may differ; and in every layer."""
    try:
        small = build.tiny_config(name).get_text_config()
    except Exception:  # its verdict says so
        return
    if not hasattr(small, "sliding_window"):
        return
    changes: dict[str, Any] = {"sliding_window": sizes.WINDOW}
    if hasattr(small, "use_sliding_window"):
        changes |= {"use_sliding_window": True, "max_window_layers": 0}
    kinds = getattr(small, "layer_types", None)
    if kinds and set(kinds) <= WINDOWED:
        turns = ("full_attention", "sliding_attention") * len(kinds)
        changes["layer_types"] = list(turns[: len(kinds)])
    if any(getattr(small, field, None) != value for field, value in changes.items()):
        yield name, "windows", changes
