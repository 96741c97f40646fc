"""Run a prompt with only some heads intact: the outputs of all others are replaced (complement ablation).

A circuit is a set of heads, each at all positions of the prompt or at some. In its run, every other output z is zero,
its mean over a reference set of prompts, or that of one reference prompt (Wang et al. 2022, section 2.2). Means are
taken by class of tokens: the position, over reference prompts with the same number of tokens, or the named span, the
last token, and all other tokens. The prompt itself, clean or corrupted, is not among the prompts of its mean. Only the
tokens of the prompt are changed, not those of the answer.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.attention.edits import TokenSet
from headscope.forward.stream_store import ResidualStreamStore
from headscope.interventions.ablation import reference_outputs
from headscope.interventions.edits import Edit, Run
from headscope.interventions.heads import LayerHead
from headscope.interventions.kinds import Replace, Zero
from headscope.interventions.metrics import Metric
from headscope.interventions.pair_runs import AnswerRuns
from headscope.interventions.replay import Activations
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair
from headscope.prompts.token_positions import ALL_TOKENS, LAST_SPAN

LayerOutputs = Activations
"""Head outputs z [H, L, d] of a prompt by index of the attention layer; none for zeros."""
ClassedPrompt = tuple[Sequence[int], Sequence[Hashable]]
"""Token ids of a prompt, with the class of each token."""
REST = "rest"
"""The class of tokens in no span."""


@dataclass(frozen=True, order=True)
class Member:
    """A head of a circuit, by index of its attention layer, at all positions, or at those of a span or by number."""

    layer: int
    head: int
    positions: str = ALL_TOKENS

    def tokens(self, pair: TokenPair) -> range:
        """The positions in a prompt. Raises BadInput if the prompt lacks them."""
        if self.positions == ALL_TOKENS:
            return range(len(pair.clean))
        return pair.span(self.positions, reserved=[ALL_TOKENS])


@dataclass(frozen=True)
class Intact:
    """What keeps its outputs in a run: these members, or everything else if they are removed."""

    members: Collection[Member]
    are_removed: bool = False


class CircuitRuns:
    """A prompt in which all but some heads have replaced outputs, one run for each set of intact heads.

    `replacements` are head outputs of the prompt's tokens, such as one mean, or one reference prompt per draw; values
    are averaged over them. `unchanged` is the metric of the unchanged model.
    """

    def __init__(
        self,
        model: Model,
        pair: TokenPair,
        metric: Metric,
        replacements: Sequence[LayerOutputs],
        memory_bytes: float,
    ):
        self.model, self.replacements, self.pair = model, replacements, pair
        self._runs = AnswerRuns(model, pair, metric, memory_bytes)
        self.unchanged = self._runs.unchanged

    def values(self, sets: Sequence[Intact]) -> list[float]:
        """The metric with only these outputs intact, for each set."""
        values = [
            self._runs.values([self._complement(intact, outputs) for intact in sets]) for outputs in self.replacements
        ]
        return [float(value) for value in np.mean(values, axis=0)]

    def _complement(self, intact: Intact, outputs: LayerOutputs) -> Run:
        """The edits that replace every output that is not intact, at the tokens of the prompt."""
        length = len(self.pair.clean)
        kind = Replace("complement", outputs, ("z",), 0, length) if len(outputs) else Zero()
        by_tokens: dict[tuple[int, ...], list[LayerHead]] = {}
        for layer, heads in enumerate(self.model.geometry.layer_heads):
            for head, is_replaced in enumerate(self._is_replaced(intact, layer, heads)):
                tokens = tuple(is_replaced.nonzero()[:, 0].tolist())
                if tokens:
                    by_tokens.setdefault(tokens, []).append((layer, head))
        return [
            Edit(kind, tuple(places), ("z",), TokenSet(slice(0, length) if len(tokens) == length else tokens))
            for tokens, places in by_tokens.items()
        ]

    def _is_replaced(self, intact: Intact, layer: int, heads: int) -> Tensor:
        """Which outputs [H, L] of a layer are replaced."""
        is_replaced = torch.full((heads, len(self.pair.clean)), not intact.are_removed)
        for member in intact.members:
            if member.layer == layer:
                tokens = member.tokens(self.pair)
                is_replaced[member.head, tokens.start : tokens.stop] = intact.are_removed
        return is_replaced


def outputs_of_prompt(model: Model, ids: Sequence[int], memory_bytes: float) -> LayerOutputs:
    """The head outputs of all layers on a prompt, under the model's position scheme."""
    layers = range(model.geometry.layers)
    with attached(model), torch.no_grad():
        outputs = reference_outputs(model, [*layers], ids)
    return _stored([outputs[layer] for layer in layers], memory_bytes)


class ReferenceMeans:
    """Mean head outputs over reference prompts by class of tokens, such as their position or span."""

    def __init__(self, model: Model, prompts: Sequence[ClassedPrompt]):
        self.model = model
        names = dict.fromkeys(name for _, classes in prompts for name in classes)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._sums, self._counts = self._totals(prompts)

    def of_prompt(
        self, classes: Sequence[Hashable], left_out: Sequence[ClassedPrompt], memory_bytes: float
    ) -> LayerOutputs:
        """The means for a prompt whose tokens have these classes, without the reference prompts `left_out`."""
        own_sums, own_counts = self._totals(left_out)
        columns = torch.tensor([self._numbers[name] for name in classes])
        counts = (self._counts - own_counts)[columns, None]
        means = [(total - own)[:, columns] / counts for total, own in zip(self._sums, own_sums, strict=True)]
        return _stored([mean.float() for mean in means], memory_bytes)

    def _totals(self, prompts: Sequence[ClassedPrompt]) -> tuple[list[Tensor], Tensor]:
        """Sums [H, classes, d] of the outputs of every layer, and the number of tokens [classes]."""
        geometry, size = self.model.geometry, len(self._numbers)
        sums = [torch.zeros(()) for _ in range(geometry.layers)]
        counts = torch.zeros(size, dtype=torch.int64)
        for ids, classes in prompts:
            columns = torch.tensor([self._numbers[name] for name in classes])
            counts.index_add_(0, columns, torch.ones_like(columns))
            with attached(self.model), torch.no_grad():
                outputs = reference_outputs(self.model, [*range(geometry.layers)], ids)
            for layer, z in outputs.items():
                total = torch.zeros(len(z), size, z.shape[-1], dtype=torch.float64)
                sums[layer] = sums[layer] + total.index_add_(1, columns, z.double().cpu())
        return sums, counts


def no_outputs() -> LayerOutputs:
    """The replacement by zeros."""
    return _stored([], 0)


def _stored(outputs: Sequence[Tensor], memory_bytes: float) -> LayerOutputs:
    """The outputs of all layers, the first `memory_bytes` in memory."""
    store = ResidualStreamStore(memory_bytes)
    for z in outputs:
        store.append(z)
    return Activations(store)


def token_classes(pair: TokenPair) -> np.ndarray:
    """The class of every token of a prompt: the name of its span, "last", or "rest"; the first span that holds it."""
    classes = np.full(len(pair.clean), REST, dtype=object)
    for name, span in reversed([*pair.spans.items()]):
        classes[span.start : span.stop] = name
    classes[-1] = LAST_SPAN
    return classes
