"""XGLM: projections, attention and output projection in one method."""

from typing import Any

from torch import Tensor

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter, split_heads
from headscope.errors import UnsupportedModel


def _forward(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if key_value_states is not None:
        raise UnsupportedModel("cannot measure this xglm model: it got the states of an encoder. Pass text only")
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (split_heads(projection(hidden_states), module.num_heads) for projection in projections)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    dropout = module.dropout if module.training else 0.0
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.scaling, dropout=dropout)
    return module.out_proj(out.flatten(2)), None


ADAPTER = FamilyAdapter("forward", _forward)
