"""Copy scores: which heads attend to the tokens of a passage while the model writes them in its answer.

Only the last query of a call matters, the one that produces the next token: q_last . k over the keys, for all heads of
a layer in one product, never L x L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention.geometry import stack_layers
from headscope.attention.record import AttentionRecord

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


def last_query_weights(records: Sequence[AttentionRecord]) -> Tensor:
    """Weights of the last query of each of B sequences on all keys of its sequence, [B, H, Lk], float32.

    The records are those of one layer and of sequences of one length; they must hold all keys.
    """
    queries = records[0].q.shape[1]
    last = torch.arange(queries - 1, queries, device=records[0].q.device)  # made there: a GPU is not waited for
    return torch.stack([record.weights(last)[:, 0] for record in records])


class StepTensors:
    """Tensors of the steps of several sequences, by layer: added for some sequences at once, read for one."""

    def __init__(self, n_layers: int):
        self._entries: list[list[tuple[Sequence[int], Tensor]]] = [[] for _ in range(n_layers)]

    def add(self, layer: int, sequences: Sequence[int], tensor: Tensor) -> None:
        """Add a step of one layer of these sequences: [B, .., H]."""
        self._entries[layer].append((sequences, tensor))

    def steps_of(self, sequence: int, fill: float) -> Tensor:
        """The steps of one sequence, [layers, T, .., H], on the CPU; missing heads of a layer are `fill`."""
        steps = [
            torch.stack([tensor[numbers.index(sequence)] for numbers, tensor in entries if sequence in numbers])
            for entries in self._entries
        ]
        return stack_layers(steps, fill).cpu()


class AnswerKeys:
    """The keys with at least `min_weight` of a head's weight in the last query of each answer step, other than the
    first token. Steps of each sequence are added in order.
    """

    def __init__(self, n_layers: int, min_weight: float):
        self.min_weight, self._most = min_weight, int(1 / min_weight)
        self._keys, self._weights = StepTensors(n_layers), StepTensors(n_layers)

    def add(self, layer: int, sequences: Sequence[int], weights: Tensor) -> None:
        """Add `last_query_weights` of one layer at one step."""
        heaviest = weights[..., 1:].topk(min(self._most, weights.shape[-1] - 1))
        missing = 0, self._most - heaviest.values.shape[-1]
        for steps, values in ((self._keys, heaviest.indices + 1), (self._weights, heaviest.values)):
            steps.add(layer, sequences, torch.nn.functional.pad(values, missing).mT)

    def compute(self, sequence: int, steps: int) -> tuple[Tensor, Tensor]:
        """The keys of the first `steps` steps: layer, step, head and key [n, 4], and their weights [n], sorted."""
        keys = self._keys.steps_of(sequence, 0)[:, :steps].mT  # layers, T, H, most
        weights = self._weights.steps_of(sequence, 0)[:, :steps].mT
        keys, order = keys.sort(-1)
        weights = weights.gather(-1, order)
        heavy = weights >= self.min_weight
        return torch.cat((heavy.nonzero()[:, :3], keys[heavy][:, None]), 1), weights[heavy]


class CopyScoreAccumulator:
    """Accumulates the top attended keys of the last query, and its weight on spans, over the steps of answers.

    `spans` has those of each sequence. Steps of each sequence are added in order. Ties go to the first key.
    """

    def __init__(self, n_layers: int, spans: Sequence[Sequence[TokenSpan]]):
        self.spans, most = spans, max(map(len, spans))
        self._padded = [[*own, *[(0, 0)] * (most - len(own))] for own in spans]
        self._top_keys, self._span_mass = StepTensors(n_layers), StepTensors(n_layers)

    def add(self, layer: int, sequences: Sequence[int], weights: Tensor) -> None:
        """Add `last_query_weights` of one layer at one step."""
        self._top_keys.add(layer, sequences, weights.argmax(-1))
        mass = [
            torch.stack([row[:, start:end].sum(-1) for start, end in self._padded[sequence]])
            for row, sequence in zip(weights, sequences, strict=True)
        ]
        self._span_mass.add(layer, sequences, torch.stack(mass))

    def compute(self, sequence: int, prompt: Tensor, answer: Tensor) -> CopyScores:
        """Copy scores for `prompt` [L] over the first T steps, which produced the tokens `answer` [T]."""
        steps, spans = len(answer), self.spans[sequence]
        top_keys = self._top_keys.steps_of(sequence, -1)[:, :steps]  # layers, T, H
        mass = self._span_mass.steps_of(sequence, 0)[:, :steps, : len(spans)].double()  # layers, T, S, H
        written_tokens = answer[None, :, None]
        scores, counts, events = [], [], []
        for span, (start, end) in enumerate(spans):
            keys = torch.arange(start, end)
            copied = (top_keys[..., None] == keys) & (prompt[keys] == written_tokens[..., None])  # layers, T, H, span
            scores.append(copied.any(1).double().mean(-1))
            counts.append(copied.sum((1, 3)))
            event = copied.nonzero()
            events.append(torch.cat((torch.full_like(event[:, :1], span), event[:, :3], event[:, 3:] + start), 1))
        mean_mass = (mass.sum(1) / max(steps, 1)).transpose(0, 1).float()
        return CopyScores(torch.stack(scores), torch.stack(counts), mean_mass, torch.cat(events))
