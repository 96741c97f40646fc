"""Small GGUF files: incomplete ones, and tiny random models written with the keys that llama.cpp's converter writes."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
NORMS_PLUS_ONE = ("gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
"""Architectures whose norms llama.cpp stores as 1 + weight."""


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
    for name, tensor in (*_tensors(arch, model), *_rope_tensors(arch, config)):
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


def _global_dims(config: Any) -> int:
    """The head_dim of Gemma 4's full-attention layers."""
    return int(config.per_layer_config[config.layer_types.index("full_attention")].head_dim)


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


def _rotary_dims(config: Any) -> int:
    rope = config.rope_parameters
    head_dim = _get(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return int(head_dim * rope.get("full_attention", rope).get("partial_rotary_factor", 1.0))


def _extra_keys(arch: str, config: Any) -> dict[str, Any]:
    """The keys that the converter writes, or leaves out, for one architecture."""
    window = getattr(config, "sliding_window", None)
    match arch:
        case "llama":
            return {"vocab_size": config.vocab_size, "rope.dimension_count": _rotary_dims(config)}
        case "phi3":
            original = config.original_max_position_embeddings
            scale = config.max_position_embeddings / original
            attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            is_scaled = config.rope_parameters["rope_type"] == "longrope"
            return {
                "rope.scaling.type": None,
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": attention if is_scaled else None,
                "rope.dimension_count": _rotary_dims(config),
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
                "rope.dimension_count": _rotary_dims(config),
                "expert_gating_func": 2,
            }
        case "stablelm":
            return {"use_parallel_residual": config.use_parallel_residual, "rope.dimension_count": _rotary_dims(config)}
        case "nemotron":
            return {
                "vocab_size": config.vocab_size,
                "rope.dimension_count": _rotary_dims(config),
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
                "rope.dimension_count": _rotary_dims(config),
            }
            if arch == "qwen35moe":
                keys["expert_feed_forward_length"] = config.moe_intermediate_size
                keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
            return keys
    return {}


def _rope_tensors(arch: str, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Factors of frequencies."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    match rope.get("rope_type"):
        case "longrope" if rope["short_factor"] == rope["long_factor"]:
            yield "rope_freqs.weight", torch.tensor(rope["long_factor"])
        case "longrope":
            yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
            yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
        case "llama3":
            yield "rope_freqs.weight", _llama3_divisors(rope, _rotary_dims(config))
        case "proportional":
            rotating = int(_global_dims(config) * rope["partial_rotary_factor"] / 2)
            yield (
                "rope_freqs.weight",
                torch.tensor([1.0] * rotating + [1e30] * (_global_dims(config) // 2 - rotating)),
            )


def _llama3_divisors(rope: dict[str, Any], dims: int) -> Tensor:
    """What llama.cpp's converter stores for Llama 3.1: the divisor of each frequency."""
    wavelengths = [2 * math.pi * rope["rope_theta"] ** (n / dims) for n in range(0, dims, 2)]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    divisors = []
    for wavelength in wavelengths:
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)


def _tensors(arch: str, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights by their names in GGUF, in llama.cpp's order of rows."""
    config = model.config
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    start = "transformer." if arch == "bloom" else ""
    for name, tensor in _converted_weights(arch, model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(name.removeprefix(start), try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise ValueError(f"gguf has no name for {name} of {arch}")
        yield gguf_name, tensor


def _converted_weights(arch: str, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    for name, tensor in model.state_dict().items():
        if "linear_attn" in name:
            tensor = _tile_value_heads(name, tensor, config)
        if name.endswith(("q_proj.weight", "q_proj.bias")) and arch == "llama":
            yield name, _permute(tensor, config.num_attention_heads)
        elif name.endswith(("k_proj.weight", "k_proj.bias")) and arch == "llama":
            yield name, _permute(tensor, config.num_key_value_heads)
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            interleaved = arch == "gpt-oss"
            gate, up = (tensor[..., ::2], tensor[..., 1::2]) if interleaved else tensor.chunk(2, dim=1)
            for part, weight in (("gate_proj", gate), ("up_proj", up)):
                yield f"{stem}{part}.weight", weight.transpose(-1, -2) if interleaved else weight
        elif name.endswith("experts.gate_up_proj_bias"):
            stem = name.removesuffix("gate_up_proj_bias")
            yield f"{stem}gate_proj.bias", tensor[..., ::2]
            yield f"{stem}up_proj.bias", tensor[..., 1::2]
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.transpose(-1, -2) if arch == "gpt-oss" else tensor
        elif name.endswith("experts.down_proj_bias"):
            yield name.replace("_bias", ".bias"), tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("mlp.e_score", "block_sparse_moe.e_score").replace("_bias", ".bias"), tensor
        elif name.endswith(("sinks", "layer_scalar")):
            yield f"{name}.weight", tensor
        elif arch in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn.norm" not in name:
            yield name, tensor + 1
        elif arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            yield name, tensor.T
        elif arch == "bloom" and "query_key_value" in name:
            heads = config.num_attention_heads
            parts = tensor.reshape(heads, 3, config.hidden_size // heads, *tensor.shape[1:])
            yield name, parts.transpose(0, 1).reshape(tensor.shape)
        elif arch == "falcon" and "query_key_value" in name and config.new_decoder_architecture:
            yield name, _falcon_rows(tensor, config)
        elif name.endswith(("conv.conv.weight", "conv1d.weight")):
            yield name, tensor.squeeze(1)
        elif name.endswith("A_log"):
            yield name, -tensor.exp()
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), tensor
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor.squeeze(0)
        else:
            yield name, tensor


def _permute(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from halves to interleaved pairs."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _tile_value_heads(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Value heads of Qwen 3.5's linear attention from grouped by key head to tiled over the key heads."""
    keys, dims = config.linear_num_key_heads, config.linear_value_head_dim

    def tile(values: Tensor, size: int) -> Tensor:
        heads = values.reshape(keys, -1, size, *values.shape[1:])
        return heads.transpose(0, 1).reshape(values.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        start = 2 * config.linear_key_head_dim * keys
        return torch.cat((tensor[:start], tile(tensor[start:], dims)))
    if "in_proj_z" in name:
        return tile(tensor, dims)
    if "out_proj" in name:
        return tile(tensor.T, dims).T
    return tile(tensor, 1) if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")) else tensor


def _falcon_rows(tensor: Tensor, config: Any) -> Tensor:
    """All queries, then all keys, then all values."""
    heads, groups = config.num_attention_heads, config.num_kv_heads
    dims = config.hidden_size // heads
    rows = tensor.reshape(groups, heads // groups + 2, dims, -1)
    return torch.cat([part.reshape(-1, tensor.shape[1]) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])
