"""Edits of heads in an eager attention of its own: dense, L x L, in float64, one head and row after the other.

Knows nothing of headscope's edits. It follows the definition: q, k and v first; then the logits, where uniform
attention comes first, biases add up, and every choice of keys is made on the logits before any choice; then z.
"""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

NAME = "eager_edits"


@dataclass(frozen=True)
class EagerEdit:
    """A kind with its numbers, on a target of heads of one layer, at tokens (all if None)."""

    kind: str
    layer: int
    heads: tuple[int, ...]
    target: str = "z"
    tokens: tuple[int, ...] | None = None
    factor: float = 0.0
    span: tuple[int, ...] = ()
    sink: int = 0
    recent: int = 0
    keys: int = 0

    def rows(self, length: int, first: int = 0) -> list[int]:
        """Indices of the tokens among those from `first` on."""
        return [n for n in range(length) if self.tokens is None or n + first in self.tokens]


Activations = dict[tuple[str, int], Tensor]
"""q, k, v, w (weights) and z of every head, [H, L, .], by name and layer."""


@dataclass
class _State:
    edits: Sequence[EagerEdit] = ()
    source: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)
    layers: dict[nn.Module, int] = field(default_factory=dict)
    record: Activations = field(default_factory=dict)


_state = _State()


def _change(t: Tensor, edit: EagerEdit) -> None:
    """Change q, k, v or z [H, L, d] of one sequence in place."""
    for head in edit.heads:
        if edit.kind == "mean":
            t[head] = t[head].mean(0, keepdim=True)
            continue
        for row in edit.rows(t.shape[1]):
            if edit.kind == "zero":
                t[head, row] = 0
            elif edit.kind == "scale":
                t[head, row] *= edit.factor
            elif edit.kind == "patch":
                values = _state.source[edit.target, edit.layer]
                if row < values.shape[1]:
                    t[head, row] = values[head, row]
            elif edit.kind == "constant":
                t[head, row] = _state.source[edit.target, edit.layer][head].mean(0)
            else:
                raise ValueError(edit.kind)


def _edited_logits(s: Tensor, hidden: Tensor, edits: Sequence[EagerEdit]) -> Tensor:
    """Logits [H, L, L] after all edits; `hidden` are the keys that a row does not see."""
    length = s.shape[1]
    for edit in edits:
        if edit.kind == "uniform":
            for head in edit.heads:
                s[head, edit.rows(length)] = 0
    s = s.masked_fill(hidden, -torch.inf)
    for edit in edits:
        if edit.kind == "steer":
            outside = [key for key in range(length) if key not in edit.span]
            for head in edit.heads:
                for row in edit.rows(length):
                    s[head, row, outside] += torch.tensor(edit.factor, dtype=torch.float64).log()
    keep = torch.ones_like(s, dtype=torch.bool)
    for edit in edits:
        for head in edit.heads:
            for row in edit.rows(length):
                chosen = torch.ones(length, dtype=torch.bool)
                if edit.kind == "suppress":
                    chosen[list(edit.span)] = False
                elif edit.kind == "streaming":
                    chosen = torch.tensor([k < edit.sink or row - k < edit.recent for k in range(length)])
                elif edit.kind == "top":
                    chosen = torch.zeros(length, dtype=torch.bool)
                    chosen[s[head, row].topk(min(edit.keys, length)).indices] = True
                keep[head, row] &= chosen
    return s.masked_fill(~keep, -torch.inf)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    layer = _state.layers[module]
    edits = [edit for edit in _state.edits if edit.layer == layer]
    repeats, length = query.shape[1] // key.shape[1], query.shape[2]
    q, k, v = query[0].double().clone(), *(t[0].double().repeat_interleave(repeats, 0) for t in (key, value))
    for name, t in (("q", q), ("k", k), ("v", v)):
        for edit in edits:
            if edit.target == name:
                _change(t, edit)
    s = (query.shape[-1] ** -0.5 if scaling is None else scaling) * q @ k.mT
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    if attention_mask is not None:
        hidden = attention_mask[0, 0, :, :length] < -1
    s = _edited_logits(s, hidden, [edit for edit in edits if edit.target == "logits"])
    if s_aux is not None:
        s = torch.cat([s, s_aux.double()[:, None, None].expand(-1, length, 1)], -1)
    w = s.softmax(-1).nan_to_num(0)[..., :length]
    z = w @ v
    for edit in edits:
        if edit.target == "z":
            _change(z, edit)
    _state.record |= {(name, layer): t for name, t in (("q", q), ("k", k), ("v", v), ("w", w), ("z", z))}
    return z[None].transpose(1, 2).to(query.dtype).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def _eager(module: PreTrainedModel) -> Any:
    before = module.config._attn_implementation
    module.set_attn_implementation(NAME)
    try:
        yield
    finally:
        module.set_attn_implementation(before)


@torch.no_grad()
def run(
    module: PreTrainedModel,
    attention_modules: Sequence[nn.Module],
    ids: Tensor,
    edits: Sequence[EagerEdit] = (),
    source: Mapping[tuple[str, int], Tensor] | None = None,
) -> tuple[Tensor, Activations]:
    """Logits [L, vocabulary] of ids [L], float64, under edits, and what every layer computed.

    `source` are the activations of another text, for patches and constants.
    """
    _state.edits, _state.source, _state.record = edits, source or {}, {}
    _state.layers = {attention: layer for layer, attention in enumerate(attention_modules)}
    with _eager(module):
        logits = module(ids[None], use_cache=False).logits[0].double()
    return logits, _state.record
