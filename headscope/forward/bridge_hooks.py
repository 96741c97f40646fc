"""Fire TransformerLens's attention hooks of a TransformerBridge from headscope's backend."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.compat.torch import FORWARD_HOOKS
from headscope.errors import BadInput

_firing: "WeakKeyDictionary[nn.Module, list[_BridgeHooks]]" = WeakKeyDictionary()


@contextmanager
def firing_bridge_hooks(attn: Any, module: nn.Module) -> Iterator[None]:
    """Fire the hooks of one attention component of a bridge, which wraps `module`, at every call of the backend.

    Of nested contexts only the outermost fires them, so each hook runs once and before other edits.
    """
    contexts = _firing.setdefault(module, [])
    hooks = _BridgeHooks(attn, module, contexts)
    contexts.append(hooks)
    try:
        with backend.editing_qkv(module, hooks.edit_qkv), backend.editing_pattern(module, hooks.edit_pattern):
            yield
    finally:
        contexts.remove(hooks)


class _BridgeHooks:
    """Edits of one attention module that fire the hooks of its bridge component."""

    def __init__(self, attn: Any, module: nn.Module, contexts: "list[_BridgeHooks]"):
        self.attn, self.module, self._contexts = attn, module, contexts
        self._batch_shape: tuple[int, int, int] = (0, 0, 0)

    def edit_qkv(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fire hook_rot_q and hook_rot_k, which see [B, L, heads, d]; only rotary architectures have them."""
        if self._contexts[0] is self:
            self._batch_shape = (len(q), q.shape[2], k.shape[2])
            if hasattr(self.attn, "hook_rot_q"):
                q, k = self.attn.hook_rot_q(q), self.attn.hook_rot_k(k)
        return q, k, v

    def edit_pattern(self, z: Tensor, call: backend.AttentionCall) -> Tensor:
        """Fire hook_attn_scores and hook_pattern, [B, H, Lq, Lk], and compute z from the pattern.

        Without a hook on them z is returned unchanged. The scores are those after edits of logits. Raises BadInput for
        a padded batch.
        """
        names = [name for name in ("hook_attn_scores", "hook_pattern") if _has_hooks(self.attn, name)]
        if self._contexts[0] is not self or not names:
            return z
        if (len(call.q), call.q.shape[2], call.k.shape[2]) != self._batch_shape:
            raise BadInput(f"{names[0]} has no L x L pattern in a padded batch. Pass one sequence at a time")
        scores = attention_scores(call)
        scores = self.attn.hook_attn_scores(scores.clamp(min=torch.finfo(call.q.dtype).min).to(call.q.dtype))
        pattern: Tensor = self.attn.hook_pattern(_softmax_with_sink(scores, call.variant.sink).to(call.v.dtype))
        return pattern @ call.v.repeat_interleave(pattern.shape[1] // call.v.shape[1], 1)


def attention_scores(call: backend.AttentionCall) -> Tensor:
    """Scaled, capped and masked logits of a call, [B, H, Lq, Lk] float32, -inf for hidden keys."""
    rows, keys = (torch.arange(t.shape[2], device=t.device) for t in (call.q, call.k))
    records = [call.edited_layer.record(sequence) for sequence in range(len(call.q))]
    return torch.stack([record.masked_logits(rows, keys) for record in records])


def _softmax_with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The attention pattern of scores [B, H, Lq, Lk], float32; `sink` [H] is a further logit in every row."""
    if sink is None:
        return scores.softmax(-1, dtype=torch.float32)
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1).to(scores)
    return torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32)[..., :-1]


def _has_hooks(attn: Any, name: str) -> bool:
    point = getattr(attn, name, None)
    return point is not None and (point.has_hooks() or bool(FORWARD_HOOKS.of(point)))
