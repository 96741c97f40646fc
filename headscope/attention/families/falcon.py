"""Falcon: RoPE or ALiBi; multi-query, grouped-query or multi-head attention."""

import sys
from typing import Any

from torch import Tensor

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter, active_dropout
from headscope.attention.masks import OpaqueMask


def _forward(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: OpaqueMask,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    query, key, value = (t.transpose(1, 2) for t in module._split_heads(module.query_key_value(hidden_states)))
    if alibi is None:
        # Looked up at every call: position schemes replace the function in the family's Python module.
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    # The newer architecture repeats the keys of a group, in its cache too.
    copies = key.shape[1] // module.num_kv_heads
    out, _ = attend(
        module,
        query,
        key[:, ::copies],
        value[:, ::copies],
        attention_mask,
        scaling=module.inv_norm_factor,
        # Falcon drops no attention weights where it rotates.
        dropout=0.0 if alibi is None else active_dropout(module.attention_dropout),
        key_bias=None if alibi is None else alibi.view(len(query), module.num_heads, -1) * module.inv_norm_factor,
    )
    return module.dense(out.flatten(2)), None


def _reference_implementation(config: Any) -> str:
    """Eager attention of transformers 5.23 adds ALiBi twice; its sdpa attention, which is the default, adds it once."""
    return "sdpa" if config.alibi else "eager"


ADAPTER = FamilyAdapter("forward", _forward, hides_mask=True, reference_implementation=_reference_implementation)
