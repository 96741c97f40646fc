"""Gemma 3n, Gemma 4, MiMo-V2-Flash and Laguna in their published layouts, whose layers differ in shape.

Depth, heads, KV heads, layer types, shared keys and towers are the published ones; widths, experts and vocabulary are
tiny. Sources: the conversion scripts of Gemma 4 in transformers, the defaults of its config classes, and the
config.json of Laguna XS.2.
"""

from typing import Any

import torch
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    LagunaConfig,
    LagunaForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from . import build, sizes

BRANCH_ENDS = (
    *("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "post_per_layer_input_norm.weight"),
    *("post_laurel_norm.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj"),
)
"""Ends of the names of the last weights of a branch that adds to the residual stream."""
LOCAL, GLOBAL = "sliding_attention", "full_attention"
WIDTHS: dict[str, Any] = {
    "vocab_size": sizes.VOCAB,
    "hidden_size": sizes.HIDDEN,
    "max_position_embeddings": sizes.NATIVE,
    "sliding_window": sizes.WINDOW,
    "pad_token_id": 0,
}
GEMMA4 = WIDTHS | {"intermediate_size": 96, "head_dim": 16, "global_head_dim": 32, "final_logit_softcapping": 30.0}
PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": sizes.VOCAB}
NO_PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 0}
EQUAL_KEYS_AND_VALUES = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
AUDIO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "use_clipped_linears": True}


def _layers(layer_types: list[str], heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "layer_types": layer_types,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


GEMMA4_LAYOUTS: dict[str, dict[str, Any]] = {
    "gemma-4-E2B": _layers(([LOCAL] * 4 + [GLOBAL]) * 7, 8, 1)
    | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
    | PER_LAYER_INPUTS,
    "gemma-4-E4B": _layers(([LOCAL] * 5 + [GLOBAL]) * 7, 8, 2) | {"num_kv_shared_layers": 18} | PER_LAYER_INPUTS,
    "gemma-4-26B-A4B": _layers(([LOCAL] * 5 + [GLOBAL]) * 5, 16, 8)
    | {"num_global_key_value_heads": 2}
    | EQUAL_KEYS_AND_VALUES
    | NO_PER_LAYER_INPUTS
    | EXPERTS,
    "gemma-4-31B": _layers(([LOCAL] * 5 + [GLOBAL]) * 10, 32, 16)
    | {"num_global_key_value_heads": 4}
    | EQUAL_KEYS_AND_VALUES
    | NO_PER_LAYER_INPUTS,
}


def gemma4(name: str) -> PreTrainedModel:
    """A published layout of Gemma 4 with its towers: E2B and E4B have an audio tower."""
    audio = AUDIO if "num_kv_shared_layers" in GEMMA4_LAYOUTS[name] else None
    vision = VISION | {"num_key_value_heads": 2, "use_clipped_linears": audio is not None, "standardize": audio is None}
    config = Gemma4Config(text_config=GEMMA4 | GEMMA4_LAYOUTS[name], vision_config=vision, audio_config=audio)
    return _drawn(Gemma4ForConditionalGeneration, config)


def gemma4_unified() -> PreTrainedModel:
    """Gemma 4 12B, which embeds images and audio without towers."""
    layers = _layers(([LOCAL] * 5 + [GLOBAL]) * 8, 16, 8)
    text = GEMMA4 | layers | {"num_global_key_value_heads": 1} | EQUAL_KEYS_AND_VALUES
    vision = {"mm_embed_dim": sizes.HIDDEN, "mm_posemb_size": 16, "output_proj_dims": sizes.HIDDEN}
    config = Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16})
    return _drawn(Gemma4UnifiedForConditionalGeneration, config)


def gemma3n(name: str) -> PreTrainedModel:
    """The language model of Gemma 3n E2B or E4B; its vision tower needs a package of its own."""
    depth, shared = {"gemma-3n-E2B": (30, 10), "gemma-3n-E4B": (35, 15)}[name]
    layers = _layers(([LOCAL] * 4 + [GLOBAL]) * (depth // 5), 8, 2)
    config = Gemma3nTextConfig(
        **(WIDTHS | layers | PER_LAYER_INPUTS),
        head_dim=16,
        intermediate_size=96,
        num_kv_shared_layers=shared,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * (depth - 10),
    )
    return _drawn(Gemma3nForCausalLM, config)


def mimo() -> PreTrainedModel:
    """MiMo-V2-Flash: 4 KV heads in global layers, 8 and sinks in local ones; values narrower than keys."""
    config = MiMoV2FlashConfig(
        **WIDTHS,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=24,
        v_head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    return _drawn(MiMoV2FlashForCausalLM, config)


def laguna() -> PreTrainedModel:
    """Laguna XS.2: 48 heads in global layers, 64 in local ones, which rotate all dimensions instead of half of them."""
    layer_types = ([GLOBAL] + [LOCAL] * 3) * 10
    full = {"rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0, "partial_rotary_factor": 0.5}
    full |= {"original_max_position_embeddings": sizes.ORIGINAL, "beta_slow": 1.0, "beta_fast": 64.0}
    config = LagunaConfig(
        **(WIDTHS | _layers(layer_types, 48, 8)),
        num_attention_heads_per_layer=[48 if layer_type == GLOBAL else 64 for layer_type in layer_types],
        head_dim=16,
        intermediate_size=96,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        rope_parameters={
            GLOBAL: full | {"attention_factor": 1.0},
            LOCAL: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
    )
    return _drawn(LagunaForCausalLM, config)


@torch.no_grad()
def _drawn(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A module with eager attention in its text part, and weights that make errors visible.

    Branches are small beside the stream, as in trained models: tens of layers would amplify rounding otherwise.
    """
    torch.manual_seed(0)
    module = kind(config)
    text_part = next(
        (key for key in module.config.sub_configs if getattr(module.config, key) is module.config.get_text_config()), ""
    )
    module.set_attn_implementation({text_part: "eager"})
    build.redraw(getattr(module.model, "language_model", module))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.8, 1.2)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.mul_(0.4)
        elif name.endswith((*BRANCH_ENDS, "language_model.norm.weight", "model.norm.weight")):
            tensor.mul_(0.3)
    return module.eval()


LAYOUTS: dict[str, Any] = {
    **{name: lambda name=name: gemma4(name) for name in GEMMA4_LAYOUTS},
    "gemma-4-12B": gemma4_unified,
    **{name: lambda name=name: gemma3n(name) for name in ("gemma-3n-E2B", "gemma-3n-E4B")},
    "MiMo-V2-Flash": mimo,
    "Laguna-XS.2": laguna,
}
"""Builder of each layout, by the name of its checkpoint."""
