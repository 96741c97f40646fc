"""Bloom, Falcon and MPT, which add ALiBi to the logits in attention code of their own (some Falcons rotate instead)."""

import sys
from typing import Any

from torch import Tensor, nn

from headscope.attention.families.override import AttentionFunction, AttentionOverride, active_dropout, split_heads
from headscope.attention.masks import OpaqueMask
from headscope.compat.transformers import BLOOM_SPLIT_HEADS, FALCON_SPLIT_HEADS
from headscope.errors import UnsupportedModel


def _forward_bloom(
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
    query, key, value = BLOOM_SPLIT_HEADS.of(module)(module.query_key_value(hidden_states))
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


BLOOM = AttentionOverride("forward", _forward_bloom, output_module="dense")


def _forward_falcon(
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
    heads = FALCON_SPLIT_HEADS.of(module)(module.query_key_value(hidden_states))
    query, key, value = (t.transpose(1, 2) for t in heads)
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


def _falcon_reference(config: Any) -> str:
    """Eager attention of transformers 5.23 adds ALiBi twice; its sdpa attention, which is the default, adds it once."""
    return "sdpa" if config.alibi else "eager"


FALCON = AttentionOverride("forward", _forward_falcon, hides_mask=True, reference_implementation=_falcon_reference)


def _forward_mpt(
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
        raise UnsupportedModel(
            f"a text of {keys} tokens is longer than the ALiBi table (max_seq_len). Use at most {max_keys} tokens"
        )
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


MPT = AttentionOverride("forward", _forward_mpt, hides_mask=True)
