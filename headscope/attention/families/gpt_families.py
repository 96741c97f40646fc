"""GPT-J, CodeGen, GPT-NeoX Japanese and GPT-Neo, whose method `_attn` gets q, k and v after the rotation; XGLM."""

from typing import Any

from torch import Tensor

from headscope.attention.families.override import AttentionFunction, AttentionOverride, active_dropout, split_heads
from headscope.attention.masks import with_window
from headscope.compat.transformers import GPT_NEO_ATTENTION, GPTJ_ATTENTION, NEOX_JAPANESE_ATTENTION
from headscope.errors import UnsupportedModel


def _attend_gptj(
    attend: AttentionFunction,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    # CodeGen rotates in float32, whatever the dtype of its weights.
    query, key = query.to(value.dtype), key.to(value.dtype)
    dropout = active_dropout(module.attn_dropout)
    out, _ = attend(module, query, key, value, attention_mask, scaling=1 / module.scale_attn, dropout=dropout)
    return out.transpose(1, 2), None


GPTJ = AttentionOverride(GPTJ_ATTENTION.attribute, _attend_gptj)


def _attend_neox_japanese(
    attend: AttentionFunction,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    dropout = active_dropout(module.attention_dropout)
    out, _ = attend(module, query, key, value, attention_mask, scaling=1 / module.norm_factor, dropout=dropout)
    return out.transpose(1, 2), None


GPT_NEOX_JAPANESE = AttentionOverride(NEOX_JAPANESE_ATTENTION.attribute, _attend_neox_japanese)


def _attend_neo(
    attend: AttentionFunction,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    if module.attention_type == "local":
        window = int(module.bias[0, 0, -1].sum())
        attention_mask = with_window(attention_mask, window, query.device)
    dropout = active_dropout(module.attn_dropout)
    out, _ = attend(module, query, key, value, attention_mask, scaling=1.0, dropout=dropout)
    return out.transpose(1, 2), None


GPT_NEO = AttentionOverride(GPT_NEO_ATTENTION.attribute, _attend_neo)


def _forward_xglm(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if key_value_states is not None:
        raise UnsupportedModel(
            "cannot measure this xglm model with encoder_hidden_states. Call it without that argument"
        )
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (split_heads(projection(hidden_states), module.num_heads) for projection in projections)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    dropout = module.dropout if module.training else 0.0
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.scaling, dropout=dropout)
    return module.out_proj(out.flatten(2)), None


XGLM = AttentionOverride("forward", _forward_xglm)
