"""The tensors of a tiny model by their names in GGUF, in the order of rows that llama.cpp's converter gives them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor
from transformers import PreTrainedModel

NORMS_PLUS_ONE = ("gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")
"""Architectures whose norms llama.cpp stores as 1 + weight."""


def rotary_dims(config: Any) -> int:
    """The dimensions of a head that rotate."""
    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(head_dim * rope.get("full_attention", rope).get("partial_rotary_factor", 1.0))


def global_dims(config: Any) -> int:
    """The head_dim of Gemma 4's full-attention layers."""
    return int(config.per_layer_config[config.layer_types.index("full_attention")].head_dim)


def rope_tensors(arch: str, config: Any) -> Iterator[tuple[str, Tensor]]:
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
            yield "rope_freqs.weight", _llama3_divisors(rope, rotary_dims(config))
        case "proportional":
            rotating = int(global_dims(config) * rope["partial_rotary_factor"] / 2)
            yield (
                "rope_freqs.weight",
                torch.tensor([1.0] * rotating + [1e30] * (global_dims(config) // 2 - rotating)),
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


def weight_tensors(arch: str, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
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
