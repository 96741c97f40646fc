"""Published layouts: small random models with the structure of well-known checkpoints (`layouts.yaml`).

Sizes shrink; what decides how a model attends stays: the order of the layers, the ratio of query heads to KV groups,
the ratio of head_dim to hidden size, windows that are shorter or longer than the context, rope scaling, shared keys,
sinks, soft-caps, norms, multipliers, and the layers with experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from . import build, sizes

FILE = Path(__file__).with_name("layouts.yaml")
LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_SHRINK = 8
"""Heads of latent attention are this many times narrower, all parts alike."""
MAX_GROUPS = 3
"""KV groups that are kept; of more groups two remain."""


@dataclass(frozen=True)
class Layout:
    """A published layout. `config` has the published fields, `layers` the decoder layers that the small model keeps,
    `small` fields of the small model that scaling does not give, `checkpoints` the hub ids with this layout."""

    name: str
    type: str
    config: dict[str, Any]
    checkpoints: tuple[str, ...]
    layers: int | tuple[int, ...] = 4
    small: dict[str, Any] = field(default_factory=dict)


@cache
def layouts() -> dict[str, Layout]:
    """All layouts by name."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    lists = ("checkpoints", "layers")
    frozen = ({k: tuple(v) if k in lists and isinstance(v, list) else v for k, v in e.items()} for e in entries)
    return {entry["name"]: Layout(**entry) for entry in frozen}


def full_text_config(layout: Layout) -> PreTrainedConfig:
    """The text part of the published config, at full size."""
    return CONFIG_MAPPING[layout.type](**layout.config).get_text_config()


def build_layout(name: str, changes: dict[str, Any] | None = None) -> PreTrainedModel:
    """The small random model of a layout, with eager attention. `changes` replace fields of its text config."""
    layout = layouts()[name]
    module = build.model_from_config(layout.type, small_config(layout, changes or {}))
    if getattr(module.config, "alibi", False):  # the eager attention of transformers 5.23 adds Falcon's ALiBi twice
        module.config._attn_implementation_internal = "sdpa"
    return module


def small_config(layout: Layout, changes: dict[str, Any]) -> PreTrainedConfig:
    """The scaled-down config of a layout."""
    kind = CONFIG_MAPPING[layout.type]
    full = kind(**layout.config)
    fields, text = full.to_dict(), full.get_text_config()
    _update(fields, build.tiny_config_fields(full, overrides={}))
    own = fields if text is full else fields["text_config"]
    own.pop("per_layer_config", None)  # Gemma 4 derives it from the other fields
    own.update(_scaled(text, layout.layers) | layout.small | changes)
    return kind.from_dict(fields)


def _update(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """Update a nested config field by field."""
    for name, value in changes.items():
        if isinstance(value, dict) and "model_type" in value:
            _update(fields[name], value)
        else:
            fields[name] = value


def _scaled(full: PreTrainedConfig, layers: int | Sequence[int]) -> dict[str, Any]:
    """The fields whose ratios or order matter."""
    published = {name: value for name, value in vars(full).items() if not name.startswith("_")}
    selected = range(layers) if isinstance(layers, int) else layers
    fields = _layer_fields(published, selected) | _head_fields(published) | _context_fields(published)
    if published.get("linear_num_key_heads"):
        ratio = published["linear_num_value_heads"] // published["linear_num_key_heads"]
        fields |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio}
    return fields


def _layer_fields(published: dict[str, Any], selected: Sequence[int]) -> dict[str, Any]:
    """The number of layers, and those entries of every list with one entry per layer."""
    counts = [name for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if name in published]
    total = published[counts[0]] if counts else len(published["layers_block_type"])
    per_layer = {n: v for n, v in published.items() if isinstance(v, list | tuple) and len(v) == total}
    shorter = {n: [build.shrunk(n, v[layer]) for layer in selected] for n, v in per_layer.items()}
    return dict.fromkeys(counts, len(selected)) | shorter


def _head_fields(published: dict[str, Any]) -> dict[str, Any]:
    """Heads, KV groups, head_dim and hidden size in their published ratios."""
    heads_name = _first(published, "num_attention_heads", "n_head", "num_heads", "n_heads")
    if heads_name is None:
        return {}
    groups_name = _first(published, "num_key_value_heads", "num_kv_heads")
    hidden_name = _first(published, "hidden_size", "n_embd", "d_model")
    assert hidden_name is not None
    full_heads, full_hidden = published[heads_name], published[hidden_name]
    full_groups = kv_groups(published, full_heads)
    heads, groups = _small_heads(full_heads, full_groups)
    fields: dict[str, Any] = {heads_name: heads} | ({groups_name: groups} if groups_name else {})
    if all(isinstance(published.get(name), int) for name in LATENT):
        parts = {name: published[name] // LATENT_SHRINK for name in LATENT}
        rope = _rope(published, parts["qk_rope_head_dim"])
        return fields | parts | rope | {"head_dim": parts["qk_rope_head_dim"], hidden_name: sizes.HIDDEN}
    full_dim = published.get("head_dim") or full_hidden // full_heads
    dim = _small_head_dim(full_dim, _rotating_share(published, full_dim))
    hidden = heads * dim * full_hidden / (full_heads * full_dim)
    fields |= {hidden_name: heads * dim if hidden == heads * dim else round(hidden / 8) * 8}
    if "head_dim" in published:
        fields["head_dim"] = published["head_dim"] and dim
    if "word_embed_proj_dim" in published:
        fields["word_embed_proj_dim"] = published["word_embed_proj_dim"] * fields[hidden_name] // full_hidden
    for name, power in (("attention_multiplier", -1), ("query_pre_attn_scalar", 1), ("rotary_dim", 1)):
        if isinstance(published.get(name), int | float):
            fields[name] = type(published[name])(published[name] * (dim / full_dim) ** power)
    return fields | _rope(published, dim)


def kv_groups(published: dict[str, Any], heads: int) -> int:
    """The KV groups of a published config."""
    if published.get("multi_query") and not published.get("new_decoder_architecture"):
        return 1
    name = _first(published, "num_key_value_heads", "num_kv_heads")
    return published[name] if name else heads


def _first(published: dict[str, Any], *names: str) -> str | None:
    return next((name for name in names if isinstance(published.get(name), int)), None)


def _small_heads(heads: int, groups: int) -> tuple[int, int]:
    """Heads and KV groups in the published ratio; a number of heads that is no power of two stays none."""
    if groups == 1:
        return min(heads, 8 - heads % 2), 1
    if groups == heads:
        count = sizes.HEADS if heads & (heads - 1) == 0 else 6
        return count, count
    small_groups = groups if groups <= MAX_GROUPS else 2
    return small_groups * heads // groups, small_groups


def _rotating_share(published: dict[str, Any], head_dim: int) -> float:
    """The share of a head's dimensions that rotate."""
    ropes = published.get("rope_parameters") or {}
    return float((published.get("rotary_dim") or head_dim) / head_dim * ropes.get("partial_rotary_factor", 1.0))


def _small_head_dim(dim: int, rotating_share: float) -> int:
    """Halved until small; wider where only a small part rotates."""
    while dim > (48 if rotating_share < 0.5 else 24) and dim % 4 == 0:
        dim //= 2
    return dim


def _rope(published: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Rope parameters for the small head_dim; per-pair factors are thinned out evenly."""
    if not isinstance(published.get("rope_parameters"), dict):
        return {}
    rope = build.small_rope(published["rope_parameters"], head_dim)
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in rope:
            last = len(rope[name]) - 1
            rope[name] = [rope[name][round(pair * last / (pairs - 1))] for pair in range(pairs)]
    return {"rope_parameters": rope}


def _context_fields(published: dict[str, Any]) -> dict[str, Any]:
    """A window that reaches over the whole published context does so in the small model."""
    fields = {}
    context, original = published.get("max_position_embeddings"), published.get("original_max_position_embeddings")
    window = published.get("sliding_window")
    if isinstance(window, int) and context:
        fields["sliding_window"] = sizes.WINDOW if window < context else sizes.NATIVE
    if original and context:
        fields["original_max_position_embeddings"] = sizes.ORIGINAL if original < context else sizes.NATIVE
    return fields
