"""GPT-NeoX Japanese: `_attn` gets q, k and v after the rotation."""

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
    dropout = active_dropout(module.attention_dropout)
    out, _ = attend(module, query, key, value, attention_mask, scaling=1 / module.norm_factor, dropout=dropout)
    return out.transpose(1, 2), None


ADAPTER = FamilyAdapter("_attn", _attn)
