"""Calls of families that compute attention in their own modules: q and k as the module makes them, and its weights."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Recorder = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor, float], None]
"""(module, q [H, L, d], k [G, L, d], alpha [H, L, L], visible [1, L, L], scaling)."""

SCALINGS: dict[str, Callable[[Any], float]] = {
    "CodeGenAttention": lambda module: 1 / module.scale_attn,
    "GPTJAttention": lambda module: 1 / module.scale_attn,
    "GPTNeoSelfAttention": lambda module: 1.0,
    "GPTNeoXJapaneseAttention": lambda module: 1 / module.norm_factor,
}
"""Scaling by class, where a method `_attn` gets q and k after the rotation."""


@contextmanager
def recording(model: PreTrainedModel, record: Recorder) -> Iterator[None]:
    """Call `record` at every call of such a module, of one sequence without cache, with eager attention."""
    with ExitStack() as stack:
        for module in model.modules():
            kind = type(module).__name__
            if kind in SCALINGS:
                stack.enter_context(_around_method(module, SCALINGS[kind](module), record))
            elif kind in QUERIES_AND_KEYS:
                hook = _after_forward(QUERIES_AND_KEYS[kind], record)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def _around_method(module: Any, scaling: float, record: Recorder) -> Iterator[None]:
    original = module._attn

    def wrapped(query: Tensor, key: Tensor, *args: Any) -> Any:
        out, alpha = original(query, key, *args)
        length = query.shape[2]
        seen = module.bias[0] if hasattr(module, "bias") else torch.ones(1, length, length, dtype=torch.bool)
        record(module, query[0], key[0], alpha[0], seen[:, :length, :length].tril(), scaling)
        return out, alpha

    module._attn = wrapped
    try:
        yield
    finally:
        del module._attn


def _after_forward(queries_and_keys: Callable[..., tuple[Tensor, Tensor, float]], record: Recorder) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        q, k, scaling = queries_and_keys(module, hidden, kwargs)
        alpha = _falcon_alibi_weights(q[0], k[0], scaling) if output[1] is None else output[1][0]
        record(module, q[0], k[0], alpha, torch.ones_like(alpha[:1], dtype=torch.bool).tril(), scaling)

    return hook


def _bloom(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    query, key, _ = module._reshape(module.query_key_value(hidden))
    return query, key, module.head_dim**-0.5


def _falcon(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    query, key, _ = (t.transpose(1, 2) for t in module._split_heads(module.query_key_value(hidden)))
    if kwargs["alibi"] is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *kwargs["position_embeddings"])
    return query, key[:, :: key.shape[1] // module.num_kv_heads], module.head_dim**-0.5


def _falcon_alibi_weights(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Weights [H, L, L] of Falcon with ALiBi, whose sdpa attention returns none; slopes are rounded to bfloat16."""
    slopes = 2.0 ** (-8 * torch.arange(1, len(q) + 1) / len(q))
    bias = (slopes.bfloat16()[:, None, None] * torch.arange(q.shape[1])).float()
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return ((q @ k.mT + bias) * scaling).masked_fill(hidden, -torch.inf).softmax(-1)


def _mpt(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    states = module.Wqkv(hidden).clamp(-(module.clip_qkv or torch.inf), module.clip_qkv or torch.inf)
    query, key, _ = (_heads(part, module.n_heads) for part in states.chunk(3, -1))
    return query, key, module.softmax_scale


def _xglm(module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    query, key = (_heads(projection(hidden), module.num_heads) for projection in (module.q_proj, module.k_proj))
    return query, key, module.scaling


def _heads(states: Tensor, heads: int) -> Tensor:
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


QUERIES_AND_KEYS = {"BloomAttention": _bloom, "FalconAttention": _falcon, "MptAttention": _mpt, "XGLMAttention": _xglm}
"""By class: (module, hidden states, its other arguments) -> q [1, H, L, d], k [1, G, L, d], scaling."""
