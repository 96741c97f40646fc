"""Bloom: ALiBi, and an attention module that adds the residual stream to its output."""

from typing import Any

from torch import Tensor, nn

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter, active_dropout
from headscope.errors import UnsupportedModel


def _forward(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise UnsupportedModel(
            "cannot measure this bloom model: it splits its output projection into slices. Set slow_but_exact to false"
        )
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    out, _ = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.inv_norm_factor,
        dropout=active_dropout(module.attention_dropout),
        key_bias=module.beta * alibi.view(len(query), module.num_heads, -1),
    )
    output = module.dense(out.flatten(2))
    return residual + nn.functional.dropout(output, module.hidden_dropout, module.training), None


ADAPTER = FamilyAdapter("forward", _forward, output_module="dense")
