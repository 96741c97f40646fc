"""Families in which each query attends to chosen keys: Doge by a learned bias, DeepSeek V3.2 and others by an indexer.

Doge is measured in texts so short that all keys are chosen.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.families.override import AttentionFunction, AttentionOverride
from headscope.attention.masks import OpaqueMask
from headscope.errors import UnsupportedModel

QUERIES_PER_BLOCK = 256
"""Queries for which an indexer scores all keys at once."""
_indexed_queries: ContextVar[slice] = ContextVar("indexed_queries", default=slice(None))


@contextmanager
def indexing(queries: slice) -> Iterator[None]:
    """Let an indexer run for some of the queries of a pass."""
    token = _indexed_queries.set(queries)
    try:
        yield
    finally:
        _indexed_queries.reset(token)


def indexed_queries() -> slice:
    """The queries of the pass for which an indexer runs."""
    return _indexed_queries.get()


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
    position_ids: Tensor | None,
    past_key_values: Any = None,
) -> Tensor:
    """The indices [B, Lq, n] of the family's own code, for blocks of queries at a time: it scores every key with every
    head of the indexer at once. Of queries that see fewer keys, the last indices are -1."""
    queries, cached = hidden_states.shape[1], 0
    if past_key_values is not None:  # it has the keys of this pass already
        cached = _cached_keys(past_key_values, module.layer_idx) - queries
    cache, parts = _IndexerCache(past_key_values), []
    for start in range(0, queries, QUERIES_PER_BLOCK):
        block = slice(start, start + QUERIES_PER_BLOCK)
        states, residual = hidden_states[:, block], q_resid[:, block]
        tables = tuple(table[:, block] for table in position_embeddings)
        mask = _causal_mask(states, cached + start)
        causal = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
        with indexing(block):
            parts.append(type(module).forward(module, states, residual, tables, causal, position_ids, cache))
    return torch.cat(
        [nn.functional.pad(part, (0, parts[-1].shape[-1] - part.shape[-1]), value=-1) for part in parts], 1
    )


class _IndexerCache:
    """Keys of an indexer, which get those of each block of queries: in the model's cache, or here if it has none."""

    def __init__(self, cache: Any):
        self.cache, self.keys = cache, list[Tensor]()

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        if self.cache is not None:
            in_cache: Tensor = self.cache.update_indexer(keys, layer)
            return in_cache
        self.keys.append(keys)
        return torch.cat(self.keys, 1)


def _cached_keys(cache: Any, layer: int) -> int:
    """Number of keys in the cache of a layer. Raises UnsupportedModel for a static cache, in which keys are empty."""
    if type(cache.layers[layer]).__name__.startswith("Static"):
        raise UnsupportedModel("its indexer would choose empty keys of the static cache. Use the model's own cache")
    return int(cache.get_seq_length(layer))


def _causal_mask(hidden_states: Tensor, cached: int) -> Tensor:
    """Whether each query of a pass sees each key, `cached` ones included: bool [1, Lq, Lk]."""
    positions = torch.arange(cached + hidden_states.shape[1], device=hidden_states.device)
    return (positions[cached:, None] >= positions)[None]


def _forward_qwen_indexer(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: OpaqueMask,
    past_key_values: Any,
) -> Tensor:
    """The chosen keys [B, Lq, n], -1 for none, in place of a mask of all keys; the attention combines it with its own.

    The cache has no keys of this pass yet.
    """
    cached = 0 if past_key_values is None else _cached_keys(past_key_values, module.layer_idx)
    causal = _causal_mask(hidden_states, cached).expand(len(hidden_states), 1, -1, -1)
    mask: Tensor = type(module).forward(module, hidden_states, position_embeddings, causal, past_key_values)
    most = min(mask.shape[-1], module.block_topk * module.compress_ratio + module.compress_ratio - 1)
    is_chosen, indices = mask[:, 0].to(torch.int8).topk(most)
    return indices.masked_fill_(is_chosen == 0, -1)


QWEN_INDEXER = AttentionOverride("forward", _forward_qwen_indexer, hides_mask=True)
SPARSE_INDEXER = AttentionOverride("forward", _forward_indexer, hides_mask=True)
