"""MPT: ALiBi from a table of a fixed length, and clipped q, k and v."""

from typing import Any

from torch import Tensor

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter, split_heads
from headscope.attention.masks import OpaqueMask
from headscope.errors import UnsupportedModel


def _forward(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    attention_mask: OpaqueMask,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (split_heads(states, module.n_heads) for states in qkv.chunk(3, dim=2))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, module.layer_idx)
    keys, max_keys = key.shape[2], position_bias.shape[2]
    if keys > max_keys:
        raise UnsupportedModel(f"a text of {keys} tokens is too long: the ALiBi table has {max_keys} (max_seq_len)")
    out, _ = attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.softmax_scale,
        dropout=module.attn_dropout_p if module.training else 0.0,
        key_bias=position_bias[None, :, 0, max_keys - keys :],
    )
    return module.out_proj(out.flatten(2)), None


ADAPTER = FamilyAdapter("forward", _forward, hides_mask=True)
