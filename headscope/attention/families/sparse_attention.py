"""Families in which each query attends to chosen keys: Doge by a learned bias, DeepSeek V3.2 and others by an indexer.

headscope measures them in texts so short that all keys are chosen.
"""

import sys
from typing import Any

from torch import Tensor, nn

from headscope.attention.families.override import AttentionFunction, AttentionOverride
from headscope.attention.masks import OpaqueMask
from headscope.errors import UnsupportedModel


def _forward_doge(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: OpaqueMask,
    past_key_values: Any = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query = module.q_norm(module.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).view(shape)).transpose(1, 2)
    value = module.v_proj(hidden_states).view(shape).transpose(1, 2)
    # Looked up in the family's namespace, where position schemes replace it.
    query, key = sys.modules[type(module).__module__].apply_rotary_pos_emb(query, key, *position_embeddings)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    if key.shape[2] > module.keep_window_size:
        limit = module.keep_window_size
        raise UnsupportedModel(
            f"cannot measure this doge model: in longer texts, each query attends only to the {limit} keys of highest "
            f"bias. Use texts of at most {limit} tokens"
        )
    bias_input = module.dt_proj(value.transpose(1, 2).flatten(2))
    bias = (module.A * nn.functional.softplus(bias_input)).exp().transpose(1, 2)  # [B, G, Lk]
    out, _ = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.scaling,
        dropout=module.attention_dropout if module.training else 0.0,
        key_bias=bias.repeat_interleave(module.num_key_value_groups, 1),
        position_ids=position_ids,
    )
    return module.o_proj(out.flatten(2)), None


DOGE = AttentionOverride("forward", _forward_doge, hides_mask=True)


def _forward_indexer(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: OpaqueMask,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    # Without a mask: if all keys are chosen, their scores do not matter; otherwise the attention function refuses.
    no_mask = hidden_states.new_zeros(1, 1, 1)
    indices: Tensor = type(module).forward(
        module, hidden_states, q_resid, position_embeddings, no_mask, *args, **kwargs
    )
    return indices


SPARSE_INDEXER = AttentionOverride("forward", _forward_indexer, hides_mask=True)
