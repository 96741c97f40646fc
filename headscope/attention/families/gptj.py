"""GPT-J and CodeGen: `_attn` gets q, k and v after the rotation of interleaved pairs."""

from typing import Any

from torch import Tensor

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter, active_dropout


def _attn(
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


ADAPTER = FamilyAdapter("_attn", _attn)
