"""Tiny random models of every architecture that transformers knows, from the defaults of their configs.

Sizes shrink by the name of the config's field; of lists with an entry a layer, layers are kept so that every kind of
layer is there twice. Weights are drawn so that errors show: attention far from uniform, sinks and biases that are not
0, norms that are not 1, windows shorter than the text.
"""

import re
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .sizes import HEADS, HIDDEN, LAYERS, ORIGINAL, OVERRIDES, SIZES, STARTS


def tiny_config_fields(config: PreTrainedConfig, overrides: dict[str, dict[str, Any]] = OVERRIDES) -> dict[str, Any]:
    """Keywords that make a tiny config of the same kind; `overrides` by model type."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, SIZES[name])
        if name.endswith("_token_id") and isinstance(value, int):
            small[name] = 1
        if name == "is_decoder" and not fields.get("is_encoder_decoder"):
            small[name] = True
        if isinstance(value, PreTrainedConfig):
            small[name] = tiny_config_fields(value, overrides) | {"model_type": value.model_type}
    for name in ("num_key_value_heads", "num_kv_heads", "num_query_groups", "num_global_key_value_heads"):
        groups, heads = fields.get(name), fields.get("num_attention_heads")
        if isinstance(groups, int):
            small[name] = 1 if groups == 1 else HEADS if groups == heads else 2
    if "head_dim" in fields and fields["head_dim"] == fields.get("qk_rope_head_dim"):
        small["head_dim"] = SIZES["qk_rope_head_dim"]
    if isinstance(fields.get("rope_parameters"), dict):
        small["rope_parameters"] = small_rope(fields["rope_parameters"], small.get("head_dim", HIDDEN // HEADS))
    layers = next((fields[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in fields), None)
    lists = {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, list | tuple) and layers is not None and len(value) == layers
    }
    if lists:
        selected_layers = _selected_layers(list(zip(*map(_hashable, lists.values()), strict=True)))
        small |= {name: [shrunk(name, values[layer]) for layer in selected_layers] for name, values in lists.items()}
        small |= {n: len(selected_layers) for n in ("num_hidden_layers", "n_layer", "num_layers") if n in fields}
    return small | overrides.get(config.model_type, {})


def small_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Rope parameters whose original context is shorter than the tiny one, and whose sections fill a tiny head."""
    small = {name: small_rope(value, head_dim) if isinstance(value, dict) else value for name, value in rope.items()}
    if "original_max_position_embeddings" in rope:
        small["original_max_position_embeddings"] = ORIGINAL
    if "mrope_section" in rope:
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        small["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return small


def shrunk(name: str, value: Any) -> Any:
    return SIZES.get(name, HEADS if "heads" in name else value) if type(value) is int and value > 1 else value


def _hashable(values: list[Any]) -> list[str]:
    return [str(value) for value in values]


def _selected_layers(kinds: list[tuple[str, ...]]) -> list[int]:
    """The first two layers of each kind, and others up to LAYERS."""
    selected_layers: set[int] = set()
    for kind in dict.fromkeys(kinds):
        selected_layers |= set([layer for layer, layer_kind in enumerate(kinds) if layer_kind == kind][:2])
    for layer in range(len(kinds)):
        if len(selected_layers) < LAYERS:
            selected_layers.add(layer)
    return sorted(selected_layers)


def tiny_config(model_type: str, changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A tiny config of that type; `changes` override what the rules give, in the text part of a composite one."""
    kind = CONFIG_MAPPING[model_type]
    fields = tiny_config_fields(kind(**STARTS.get(model_type, {})))
    fields.get("text_config", fields).update(changes or {})
    return kind(**fields)


def tiny(model_type: str, changes: dict[str, Any] | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny random float32 model of that type with eager attention, in evaluation mode."""
    return model_from_config(model_type, tiny_config(model_type, changes), seed)


def model_from_config(model_type: str, config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random float32 model with eager attention, in evaluation mode."""
    auto = AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    kind = auto._model_mapping[type(config)]
    if not isinstance(config, kind.config_class):  # the language model of a composite
        parts = (part for part in vars(config).values() if isinstance(part, kind.config_class))
        config = next(parts, config)
    torch.manual_seed(seed)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    redraw(model)
    return model


QUERIES = re.compile(r"(q|k|qk|qkv|query|key|c_attn|query_key_value|wqkv|q_[ab]|kv_[ab]|kv)(_proj\w*)?\.weight$", re.I)


@torch.no_grad()
def redraw(model: nn.Module) -> None:
    """Scale the weights that a model was made with: attention is peaked, every bias, norm and sink speaks."""
    for module in model.modules():
        if type(module).__name__.endswith("LayerNorm1P"):  # multiplies by weight + 1: trained weights are near 0
            module.weight.sub_(1)
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        if p.dim() >= 2:
            spread = float(p.std()) if p.numel() > 1 else 0.0
            if "embed" in name or "wte" in name or "wpe" in name:
                target = 1.0
            else:
                target = 1.7 if QUERIES.search(name.rpartition("self_attn.")[2]) or QUERIES.search(name) else 1.0
                target /= p.shape[-1] ** 0.5
            if spread > 1e-8:
                p.mul_(target / spread)
            else:
                p.add_(target * torch.randn_like(p))
        else:
            p.add_(0.3 * torch.randn_like(p))
            if re.search(r"(q|k|query|key)_(norm|layernorm)\.weight|qk_norm\.temp", name):
                p.add_(0.8)
