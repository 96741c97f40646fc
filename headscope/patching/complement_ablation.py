"""Run a prompt with only some heads intact: the outputs of all others are replaced (complement ablation).

A circuit is a set of heads. In its run, the output z of every other head is zero, its mean over a reference set of
prompts, or that of one reference prompt (Wang et al. 2022, section 2.2). Means are taken by position, over reference
prompts with the same number of tokens as the prompt, or by class of tokens: each named span, the last token, and all
other tokens. Only the tokens of the prompt are changed, not those of the answer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.attention import backend
from headscope.forward.ablation import reference_outputs
from headscope.forward.free_memory import runs_per_batch
from headscope.forward.replay import Replay
from headscope.patching.metrics import Metric, PairTokens, finite_metric, metric_function
from headscope.patching.path_patching import LayerIndexHead
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair
from headscope.prompts.token_positions import LAST_SPAN

LayerOutputs = Mapping[int, Tensor]
"""Head outputs z [H, L, d] by index of the attention layer; empty for zeros."""
REST = "rest"
"""The class of tokens in no span."""


class ComplementReplay:
    """A prompt whose heads outside of a set have replaced outputs, one run for each set.

    `replacements` are head outputs of the prompt's tokens, such as one mean, or one reference prompt per draw; values
    are averaged over them.
    """

    def __init__(
        self,
        model: Model,
        pair: TokenPair,
        metric: Metric,
        replacements: Sequence[LayerOutputs],
        memory_bytes: float,
    ):
        self.model, self.replacements, self.prompt_length = model, replacements, len(pair.clean)
        tokens = PairTokens.on_device(pair, model.device)
        self._answer = tokens.answer
        schedule: Any = model.schedule
        self._replay = Replay(model, schedule, tokens.clean, memory_bytes, len(pair.clean))
        with self._replay.capturing():
            self._replay.record_streams()
            logits = self._replay.target_logits({})
        self._metric = metric_function(metric, tokens, logits)
        self.unchanged = finite_metric(model, self._metric, logits, self._answer)

    def values(self, kept: Sequence[Collection[LayerIndexHead]]) -> list[float]:
        """The metric with only these heads intact, for each set of heads (layer index, head)."""
        batch = runs_per_batch(self.model, self._replay.ids.shape[1])
        by_replacement = []
        with self._replay.capturing():
            for outputs in self.replacements:
                values: list[float] = []
                for first in range(0, len(kept), batch):
                    members = kept[first : first + batch]
                    logits = self._replay.target_logits_of_edits(self._edits(members, outputs), len(members))
                    values += [finite_metric(self.model, self._metric, one, self._answer) for one in logits]
                by_replacement.append(values)
        return [float(value) for value in np.mean(by_replacement, axis=0)]

    def _edits(
        self, kept: Sequence[Collection[LayerIndexHead]], outputs: LayerOutputs
    ) -> dict[int, backend.OutputEdit]:
        """Edits of all layers, one run for each set of kept heads."""

        def edit_of(layer: int, heads: int) -> backend.OutputEdit:
            is_replaced = torch.tensor([[(layer, head) not in members for head in range(heads)] for members in kept])

            def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
                replaced, at = z.clone(), is_replaced.to(z.device)[:, :, None, None]
                new = outputs[layer].to(z) if outputs else torch.zeros_like(z[0, :, : self.prompt_length])
                prompt = slice(None, self.prompt_length)
                replaced[:, :, prompt] = torch.where(at, new, z[:, :, prompt])
                return replaced

            return edit

        return {layer: edit_of(layer, heads) for layer, heads in enumerate(self.model.geometry.layer_heads)}


def outputs_of_prompt(model: Model, ids: Sequence[int]) -> LayerOutputs:
    """The head outputs of all layers on a prompt, under the model's position scheme."""
    with attached(model), torch.no_grad():
        return reference_outputs(model, [*range(model.geometry.layers)], ids)


def mean_by_position(model: Model, prompts: Iterable[Sequence[int]]) -> LayerOutputs:
    """The mean of the head outputs over prompts with the same number of tokens, position by position."""
    sums: dict[int, Tensor] = {}
    count = 0
    for ids in prompts:
        count += 1
        for layer, z in outputs_of_prompt(model, ids).items():
            sums[layer] = z.double().cpu() + sums.get(layer, 0)
    return {layer: (total / count).float() for layer, total in sums.items()}


def mean_by_span(model: Model, prompts: Iterable[tuple[Sequence[int], np.ndarray]]) -> dict[str, LayerOutputs]:
    """The mean of the head outputs over all tokens of each class: layer -> [H, 1, d], by class.

    `prompts` are token ids with the class of each token, as `token_classes` has them.
    """
    sums: dict[str, dict[int, Tensor]] = {}
    counts: dict[str, int] = {}
    for ids, classes in prompts:
        outputs = outputs_of_prompt(model, ids)
        for name in dict.fromkeys(classes.tolist()):
            at = torch.from_numpy(np.flatnonzero(classes == name))
            counts[name] = counts.get(name, 0) + len(at)
            by_layer = sums.setdefault(name, {})
            for layer, z in outputs.items():
                by_layer[layer] = z.double().cpu()[:, at].sum(1, keepdim=True) + by_layer.get(layer, 0)
    return {
        name: {layer: (total / counts[name]).float() for layer, total in by_layer.items()}
        for name, by_layer in sums.items()
    }


def outputs_by_class(means: Mapping[str, LayerOutputs], classes: np.ndarray) -> LayerOutputs:
    """The head outputs of a prompt whose tokens have these classes, each with the mean of its class."""
    layers = next(iter(means.values()))
    return {layer: torch.cat([means[name][layer] for name in classes.tolist()], 1) for layer in layers}


def token_classes(pair: TokenPair) -> np.ndarray:
    """The class of every token of a prompt: the name of its span, "last", or "rest"; the first span that holds it."""
    classes = np.full(len(pair.clean), REST, dtype=object)
    for name, span in reversed([*pair.spans.items()]):
        classes[span.start : span.stop] = name
    classes[-1] = LAST_SPAN
    return classes
