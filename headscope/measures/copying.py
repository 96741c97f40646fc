"""Copy scores: which heads attend to the tokens of a passage while the model writes them in its answer.

Only the last query of a call matters, the one that produces the next token: q_last . k over the keys, for all heads of
a layer in one product, never L x L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord, stack_layers

TokenSpan = tuple[int, int]
"""First token and end (exclusive) of a passage in the prompt."""


@dataclass(frozen=True, eq=False)
class CopyScores:
    """Copy scores of all heads over T answer steps, for each of S spans.

    A head copies a token of the span at a step if its top attended token is that token and the model writes it.
    scores [S, layers, H]: share of the span's tokens that the head copied at some step, 0..1. copy_counts
    [S, layers, H]: number of steps at which it copied. span_mass [S, layers, H]: mean weight on the span over the
    steps, 0..1, 0 without steps. copy_events [n, 5]: span, layer, step, head and key of every copy. H is the largest
    number of heads of a layer; heads that a layer does not have are 0.
    """

    scores: Tensor
    copy_counts: Tensor
    span_mass: Tensor
    copy_events: Tensor


def last_query_top_key_and_span_mass(record: AttentionRecord, spans: Tensor) -> tuple[Tensor, Tensor]:
    """Top attended key [H] of the last query, and its weight on each span [S, H], float32.

    `spans` [S, 2] are first and end indices of keys; the record must hold all keys of the sequence. Ties go to the
    first key.
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


class AnswerKeysAccumulator:
    """Collects the keys with at least `min_weight` of a head's weight in the last query of each answer step, other than
    the first token. `update` is a listener of every layer; the steps come in order.
    """

    def __init__(self, n_layers: int, min_weight: float):
        self.min_weight = min_weight
        self._steps: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n_layers)]

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer at one step."""
        _, weights = last_query_weights(record)
        head, key = (weights[:, 1:] >= self.min_weight).nonzero(as_tuple=True)
        self._steps[record.layer].append((torch.stack((head, key + 1), 1).cpu(), weights[head, key + 1].cpu()))

    def compute(self, steps: int) -> tuple[Tensor, Tensor]:
        """The keys of the first `steps` steps: layer, step, head and key [n, 4], and their weights [n], sorted."""
        entries = [
            (torch.nn.functional.pad(heads_and_keys, (2, 0)) + torch.tensor([layer, step, 0, 0]), weights)
            for layer, by_step in enumerate(self._steps)
            for step, (heads_and_keys, weights) in enumerate(by_step[:steps])
        ]
        if not entries:
            return torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0)
        indices, weights = (torch.cat(parts) for parts in zip(*entries, strict=True))
        return indices, weights


class CopyScoreAccumulator:
    """Accumulates `last_query_top_key_and_span_mass` over the steps of one answer.

    `update` is a listener of every layer; the steps come in order.
    """

    def __init__(self, n_layers: int, spans: Sequence[TokenSpan]):
        self.spans = torch.tensor(spans)
        self._top_keys: list[list[Tensor]] = [[] for _ in range(n_layers)]
        self._span_mass: list[list[Tensor]] = [[] for _ in range(n_layers)]

    def update(self, record: AttentionRecord) -> None:
        """Add the record of one layer at one step."""
        top_key, mass = last_query_top_key_and_span_mass(record, self.spans)
        self._top_keys[record.layer].append(top_key)
        self._span_mass[record.layer].append(mass)

    def compute(self, prompt: Tensor, answer: Tensor) -> CopyScores:
        """Copy scores for `prompt` [L] over the first T steps, which produced the tokens `answer` [T]."""
        steps = len(answer)
        top_keys = _stack_steps(self._top_keys, -1)[:, :steps]  # layers, T, H
        mass = _stack_steps(self._span_mass, 0)[:, :steps].double()  # layers, T, S, H
        written_tokens = answer[None, :, None]
        scores, counts, events = [], [], []
        for span, (start, end) in enumerate(self.spans.tolist()):
            keys = torch.arange(start, end)
            copied = (top_keys[..., None] == keys) & (prompt[keys] == written_tokens[..., None])  # layers, T, H, span
            scores.append(copied.any(1).double().mean(-1))
            counts.append(copied.sum((1, 3)))
            event = copied.nonzero()
            events.append(torch.cat((torch.full_like(event[:, :1], span), event[:, :3], event[:, 3:] + start), 1))
        mean_mass = (mass.sum(1) / max(steps, 1)).transpose(0, 1).float()
        return CopyScores(torch.stack(scores), torch.stack(counts), mean_mass, torch.cat(events))


def _stack_steps(steps_by_layer: list[list[Tensor]], fill: float) -> Tensor:
    return stack_layers([torch.stack(steps).cpu() for steps in steps_by_layer], fill)
