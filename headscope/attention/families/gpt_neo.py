"""GPT-Neo: logits are not scaled, and local layers see a window of keys."""

from typing import Any

from torch import Tensor

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter, active_dropout
from headscope.attention.masks import with_window


def _attn(
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


ADAPTER = FamilyAdapter("_attn", _attn)
