"""Which heads copy a passage while the model answers: the key each answer row looks at most, and its weight on spans.

Only the last query of a call is looked at, the one that produces the next token: q_last . k over the keys, all heads of
a layer in one product, never L x L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord

TokenSpan = tuple[int, int]
"""First token and end (exclusive) of a passage in the prompt."""


@dataclass(frozen=True, eq=False)
class CopyScores:
    """What the heads did over T answer steps: T layers x H heads for each of S spans.

    score [S, layers, H]: share of the span's tokens that were copied at some step, 0..1. copies [S, layers, H]: steps
    at which the head copied. mass [S, layers, H]: mean weight on the span, 0..1, 0 without a step. places [n, 5] are
    the copies one by one: span, layer, step, head and key.
    """

    scores: Tensor
    copy_counts: Tensor
    span_mass: Tensor
    copy_events: Tensor


def last_query_top_key_and_span_mass(record: AttentionRecord, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Of the last query's row: the key with the largest weight [H], and the weight on each span [S, H], float32.

    `spans` [S, 2] index the keys, which are all of the sequence. Among equal weights the first key is taken.
    """
    logits, weights = last_query_weights(record)
    return logits.argmax(-1), torch.stack([weights[:, start:end].sum(-1) for start, end in spans.tolist()])


def last_query_weights(record: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Logits and weights of the last query on all keys of the sequence, [H, Lk], float32."""
    groups, keys, dim = record.k.shape
    q = record.q[:, -1].float().view(groups, -1, dim)
    logits = record.soft_cap((q @ record.k.float().mT).flatten(0, 1) * record.scaling)
    logits[:, : keys - int(record.visible_counts[-1])] = -torch.inf
    weights = logits.softmax(-1)
    if record.sink_weight is not None:
        weights = weights * (1 - record.sink_weight[:, -1:])
    return logits, weights


class CopyScoreAccumulator:
    """Accumulates `last_row` over the steps of one answer; `update` listens to every layer of each step."""

    def __init__(self, n_layers: int, spans: Sequence[TokenSpan]):
        self.spans = torch.tensor(spans)
        self._top_keys: list[list[Tensor]] = [[] for _ in range(n_layers)]
        self._span_mass: list[list[Tensor]] = [[] for _ in range(n_layers)]

    def update(self, record: AttentionRecord) -> None:
        """Take one layer of one step."""
        largest, mass = last_query_top_key_and_span_mass(record, self.spans)
        self._top_keys[record.layer].append(largest)
        self._span_mass[record.layer].append(mass)

    def compute(self, prompt: Tensor, answer: Tensor) -> CopyScores:
        """What was copied of `prompt` [L] in the first T steps, which produced the tokens `answer` [T]."""
        steps = len(answer)
        largest = _stack_steps(self._top_keys)[:, :steps]  # layers, T, H
        mass = _stack_steps(self._span_mass)[:, :steps].double()  # layers, T, S, H
        written = answer[None, :, None]
        scores, copies, places = [], [], []
        for span, (start, end) in enumerate(self.spans.tolist()):
            place = torch.arange(start, end)
            copied = (largest[..., None] == place) & (prompt[place] == written[..., None])  # layers, T, H, span
            scores.append(copied.any(1).double().mean(-1))
            copies.append(copied.sum((1, 3)))
            at = copied.nonzero()
            places.append(torch.cat((torch.full_like(at[:, :1], span), at[:, :3], at[:, 3:] + start), 1))
        weight = (mass.sum(1) / max(steps, 1)).transpose(0, 1).float()
        return CopyScores(torch.stack(scores), torch.stack(copies), weight, torch.cat(places))


def _stack_steps(steps_by_layer: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(steps).cpu() for steps in steps_by_layer])
