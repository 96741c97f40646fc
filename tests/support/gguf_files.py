"""Small GGUF files: incomplete ones, and tiny random models written with the keys that llama.cpp's converter writes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support.gguf_tensors import rope_tensors, rotary_dims, weight_tensors

ARCHITECTURES = {
    "mistral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""Model types of transformers whose name in GGUF differs."""


def gguf_name(model_type: str) -> str:
    """The name of a model type in GGUF."""
    return ARCHITECTURES.get(model_type, model_type)


def write_gguf(path: Path, blocks: int, leave_out: str = "", architecture: str = "llama", parts: int = 1) -> Path:
    """A GGUF of two blocks of width 8, with the tensors of only `blocks` of them; the first of `parts` files."""
    writer = GGUFWriter(path, architecture)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(16)
    if blocks >= 0:
        for name, shape in {"token_embd": (16, 8), "output_norm": (8,), "output": (16, 8)}.items():
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    for block in range(blocks):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            if name != leave_out:
                writer.add_tensor(f"blk.{block}.{name}.weight", np.ones((8, 8), np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{block}.{name}.weight", np.ones(8, np.float32))
    _close(writer)
    return path


def write_model(
    path: Path, model: PreTrainedModel, settings: Mapping[str, Any] | None = None, name: str = "tiny"
) -> Path:
    """Write a model as float32 GGUF, as llama.cpp's converter does; `settings` adds keys without the architecture.

    A setting of None removes the key that the converter writes.
    """
    config = model.config
    arch = gguf_name(config.model_type)
    writer = GGUFWriter(path, arch)
    writer.add_name(name)
    keys = {**_sizes(config), **_rope(config), **_extra_keys(arch, config), **(settings or {})}
    for key, value in keys.items():
        if value is not None:
            _add(writer, f"{arch}.{key}", value)
    _add_vocabulary(writer, config.vocab_size)
    for name, tensor in (*weight_tensors(arch, model), *rope_tensors(arch, config)):
        writer.add_tensor(name, tensor.detach().float().contiguous().numpy())
    _close(writer)
    return path


def _close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """A byte-level vocabulary of `size` tokens (at least 257) with one merge."""
    alphabet = [*bytes_to_unicode().values(), "Ġt"]
    tokens = alphabet + [f"[PAD{n}]" for n in range(len(alphabet), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(alphabet) + [5] * (size - len(alphabet)))
    writer.add_token_merges(["Ġ t"])


def _get(config: Any, *names: str) -> Any:
    """The first of these attributes that the config has and that is not None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _head_dim(config: Any) -> int | None:
    """The head_dim that the config states."""
    return None if config.model_type == "gemma4_text" else _get(config, "head_dim")


def _kv_heads(config: Any) -> Any:
    """KV heads: a list by layer for Gemma 4."""
    if config.model_type != "gemma4_text":
        return _get(config, "num_key_value_heads")
    return [config.per_layer_config[layer].num_key_value_heads for layer in range(config.num_hidden_layers)]


def _sizes(config: Any) -> dict[str, Any]:
    """The keys that the converter writes for every architecture."""
    eps = _get(config, "rms_norm_eps")
    layer_norm_eps = _get(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return {
        "block_count": config.num_hidden_layers,
        "context_length": _get(config, "max_position_embeddings", "n_positions", "seq_length"),
        "embedding_length": config.hidden_size,
        "feed_forward_length": _get(config, "intermediate_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": eps if eps is not None or layer_norm_eps else _get(config, "norm_eps"),
        "attention.layer_norm_epsilon": layer_norm_eps,
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "expert_count": _get(config, "num_local_experts", "num_experts"),
        "expert_used_count": _get(config, "num_experts_per_tok"),
    }


def _rope(config: Any) -> dict[str, Any]:
    """The keys of rotation."""
    rope = getattr(config, "rope_parameters", None) or {}
    local, rope = rope.get("sliding_attention", {}), rope.get("full_attention", rope)
    keys = {"rope.freq_base": rope.get("rope_theta"), "rope.freq_base_swa": local.get("rope_theta")}
    if "mrope_section" in rope:
        keys["rope.dimension_sections"] = [*rope["mrope_section"], 0, 0, 0, 0][:4]
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": RopeScalingType(kind).value, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_ext_factor": rope.get("extrapolation_factor"),
            "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    if kind == "longrope" and rope["short_factor"] != rope["long_factor"]:
        keys["rope.scaling.type"] = "longrope"
    for key, value in keys.items():
        keys[key] = float(value) if isinstance(value, int) and "length" not in key else value
    return keys


def _extra_keys(arch: str, config: Any) -> dict[str, Any]:
    """The keys that the converter writes, or leaves out, for one architecture."""
    window = getattr(config, "sliding_window", None)
    match arch:
        case "llama":
            return {"vocab_size": config.vocab_size, "rope.dimension_count": rotary_dims(config)}
        case "phi3":
            original = config.original_max_position_embeddings
            scale = config.max_position_embeddings / original
            attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            is_scaled = config.rope_parameters["rope_type"] == "longrope"
            return {
                "rope.scaling.type": None,
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": attention if is_scaled else None,
                "rope.dimension_count": rotary_dims(config),
                "attention.sliding_window": window or 0,
            }
        case "gemma2":
            return {
                "rope.freq_base": None,
                "attn_logit_softcapping": config.attn_logit_softcapping,
                "final_logit_softcapping": config.final_logit_softcapping,
                "attention.sliding_window": window,
            }
        case "gemma3":
            return {
                "final_logit_softcapping": config.final_logit_softcapping,
                "attention.sliding_window": window,
            }
        case "gemma4":
            layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
            widths = [config.intermediate_size * (1 + (layer >= layers - shared)) for layer in range(layers)]
            sliding = [kind == "sliding_attention" for kind in config.layer_types]
            return {
                "final_logit_softcapping": config.final_logit_softcapping,
                "attention.sliding_window": window,
                "feed_forward_length": widths if config.use_double_wide_mlp else widths[0],
                "attention.shared_kv_layers": config.num_kv_shared_layers,
                "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
                "attention.sliding_window_pattern": sliding,
                "attention.key_length": 2 * config.per_layer_config[0].head_dim,
                "attention.value_length": 2 * config.per_layer_config[0].head_dim,
                "attention.key_length_swa": config.per_layer_config[0].head_dim,
                "attention.value_length_swa": config.per_layer_config[0].head_dim,
                "rope.dimension_count": 2 * config.per_layer_config[0].head_dim,
                "rope.dimension_count_swa": config.per_layer_config[0].head_dim,
            }
        case "gpt-oss":
            return {
                "attention.sliding_window": window,
                "expert_feed_forward_length": config.intermediate_size,
            }
        case "qwen2moe" | "qwen3moe":
            return {
                "expert_feed_forward_length": config.moe_intermediate_size,
                "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
            }
        case "minimax-m2":
            return {
                "expert_feed_forward_length": config.intermediate_size,
                "rope.dimension_count": rotary_dims(config),
                "expert_gating_func": 2,
            }
        case "stablelm":
            return {"use_parallel_residual": config.use_parallel_residual, "rope.dimension_count": rotary_dims(config)}
        case "nemotron":
            return {
                "vocab_size": config.vocab_size,
                "rope.dimension_count": rotary_dims(config),
                "attention.layer_norm_rms_epsilon": None,
                "attention.layer_norm_epsilon": config.norm_eps,
                "rope.scaling.type": "none",
            }
        case "falcon":
            return {
                "context_length": 2048,
                "feed_forward_length": 4 * config.hidden_size,
                "tensor_data_layout": "jploski",
                "attention.head_count_kv": config.num_kv_heads if config.new_decoder_architecture else 1,
                "rope.freq_base": None,
                "attention.layer_norm_rms_epsilon": None,
            }
        case "gpt2":
            return {"attention.head_count_kv": None}
        case "bloom":
            return {"context_length": config.hidden_size, "attention.head_count_kv": config.num_attention_heads}
        case "lfm2":
            is_attention = [kind == "full_attention" for kind in config.layer_types]
            return {
                "vocab_size": config.vocab_size,
                "shortconv.l_cache": config.conv_L_cache,
                "attention.head_count_kv": [config.num_key_value_heads * flag for flag in is_attention],
            }
        case "qwen35" | "qwen35moe":
            keys = {
                "ssm.conv_kernel": config.linear_conv_kernel_dim,
                "ssm.state_size": config.linear_key_head_dim,
                "ssm.group_count": config.linear_num_key_heads,
                "ssm.time_step_rank": config.linear_num_value_heads,
                "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
                "full_attention_interval": 4,
                "rope.dimension_count": rotary_dims(config),
            }
            if arch == "qwen35moe":
                keys["expert_feed_forward_length"] = config.moe_intermediate_size
                keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
            return keys
    return {}
