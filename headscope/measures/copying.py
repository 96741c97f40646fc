"""Which heads copy a passage while the model answers: the key each answer row looks at most, and its weight on spans.

Only the last query of a call is looked at, the one that produces the next token: q_last . k over the keys, all heads of
a layer in one product, never L x L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord

Span = tuple[int, int]
"""First token and end (exclusive) of a passage in the prompt."""


@dataclass(frozen=True, eq=False)
class Copies:
    """What the heads did over T answer steps: T layers x H heads for each of S spans.

    score [S, layers, H]: share of the span's tokens that were copied at some step, 0..1. copies [S, layers, H]: steps
    at which the head copied. mass [S, layers, H]: mean weight on the span, 0..1, 0 without a step. places [n, 5] are
    the copies one by one: span, layer, step, head and key.
    """

    score: Tensor
    copies: Tensor
    mass: Tensor
    places: Tensor


def last_row(heard: AttentionRecord, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Of the last query's row: the key with the largest weight [H], and the weight on each span [S, H], float32.

    `spans` [S, 2] index the keys, which are all of the sequence. Among equal weights the first key is taken.
    """
    logits, weights = last_weights(heard)
    return logits.argmax(-1), torch.stack([weights[:, start:end].sum(-1) for start, end in spans.tolist()])


def last_weights(heard: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Logits and weights of the last query on all keys of the sequence, [H, Lk], float32."""
    groups, keys, dim = heard.k.shape
    q = heard.q[:, -1].float().view(groups, -1, dim)
    logits = heard.capped((q @ heard.k.float().mT).flatten(0, 1) * heard.scaling)
    logits[:, : keys - int(heard.visible[-1])] = -torch.inf
    weights = logits.softmax(-1)
    if heard.sink_share is not None:
        weights = weights * (1 - heard.sink_share[:, -1:])
    return logits, weights


class AnswerRows:
    """Accumulates `last_row` over the steps of one answer; `update` listens to every layer of each step."""

    def __init__(self, layers: int, spans: Sequence[Span]):
        self.spans = torch.tensor(spans)
        self._largest: list[list[Tensor]] = [[] for _ in range(layers)]
        self._mass: list[list[Tensor]] = [[] for _ in range(layers)]

    def update(self, heard: AttentionRecord) -> None:
        """Take one layer of one step."""
        largest, mass = last_row(heard, self.spans)
        self._largest[heard.layer].append(largest)
        self._mass[heard.layer].append(mass)

    def compute(self, prompt: Tensor, answer: Tensor) -> Copies:
        """What was copied of `prompt` [L] in the first T steps, which produced the tokens `answer` [T]."""
        steps = len(answer)
        largest = _stacked(self._largest)[:, :steps]  # layers, T, H
        mass = _stacked(self._mass)[:, :steps].double()  # layers, T, S, H
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
        return Copies(torch.stack(scores), torch.stack(copies), weight, torch.cat(places))


def _stacked(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(steps).cpu() for steps in rows])
