"""Activation patching: run one prompt of a pair with activations taken from the run of the other prompt.

Denoising runs the corrupted prompt with activations of the clean run; noising runs the clean prompt with those of the
corrupted run. An activation is z (head output before o_proj), q or k (after rotation and norms), v, the attention
pattern or one entry of it, or a part of a layer (`parts`). A run is a list of edits, exact effects come from
`Replay.evaluate`. An estimate is attribution patching (Nanda 2023): <dm/dz, z' - z>, summed over positions, where z' is
the head's output with the patched activation. z' is computed exactly, softmax included, so that a saturated softmax
does not bias the estimate (AtP*, Kramar et al. 2024). The KL divergence has no first order in the clean run; noising
estimates its second order.

Both prompts are followed by the answer's tokens, and metrics read the logits that predict these tokens. A pair may have
another corrupted answer after its corrupted prompt; the metrics score the answer there as well. Tokens with which both
prompts begin are computed once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from headscope.attention import backend, families
from headscope.attention.edits import TokenSet
from headscope.forward.layer_parts import LayerParts
from headscope.forward.prefix_cache import FrozenPrefix, shared_prefix
from headscope.interventions.edits import Edit, Run
from headscope.interventions.heads import Unit, head_units, kv_group_units
from headscope.interventions.kinds import Replace, RunPattern
from headscope.interventions.metrics import Metric, PairTokens, finite_metric, metric_function
from headscope.interventions.parts import PartName, ReplacePart
from headscope.interventions.replay import ActivationName, Objective, Replay
from headscope.measures.row_sampling import query_range
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair, stored_metric_name

Activation = Literal["z", "q", "k", "v", "pattern"]
Direction = Literal["denoising", "noising"]

GROUP_ACTIVATIONS = ("k", "v")
"""Activations that all query heads of a KV group share."""
CURVATURE_TOKENS = 8
"""Next tokens of a second-order estimate, each with a backward pass [ours]."""


def patched_units(model: Model, activation: Activation) -> list[Unit]:
    """The units that are patched one at a time: KV groups for k and v, else query heads."""
    return (kv_group_units if activation in GROUP_ACTIVATIONS else head_units)(model.geometry)


class PairRuns:
    """The clean and the corrupted run of a prompt pair, and runs of one of them with activations of the other.

    `clean_value` and `corrupted_value` are the metric in the two unchanged runs. Call every method inside `capturing`.
    Memory holds the residual streams of both runs and their activations (the first `memory_bytes`; the rest is on
    disk). Prompts of different lengths allow only z and v: q and k are rotated by their positions. `parts` are those of
    the layers, for patches of attn_out and mlp_out. Raises BadInput if the metric is not finite.
    """

    def __init__(self, model: Model, pair: PairTokens, metric: Metric, memory_bytes: float, parts: LayerParts = ()):
        self.model, self.pair, self.metric_name = model, pair, stored_metric_name(metric)
        schedule: Any = model.schedule
        texts = (pair.clean, pair.corrupted)
        first_targets = [ids.shape[1] - len(pair.answer) for ids in texts]
        replays = [
            Replay(model, schedule, ids, memory_bytes / 2, first, pair.answer, parts)
            for ids, first in zip(texts, first_targets, strict=True)
        ]
        self.clean, self.corrupted = replays
        with self.capturing():
            edits = backend.registered_edits(model.attention_modules)
            tokens = min(shared_prefix(model, *texts), *(first - 1 for first in first_targets))
            is_aligned = first_targets[0] == first_targets[1]  # else a token may correspond to one of the prefix
            if tokens and is_aligned and not any(edit.kind.needs_whole_text for edit in edits):
                prefix = FrozenPrefix(model, pair.clean[:, :tokens])
                for replay in replays:
                    replay.use_prefix(prefix)
            for replay in replays:
                replay.record_streams()
            clean_logits, corrupted_logits = (replay.target_logits() for replay in replays)
        self._values: dict[tuple[Direction, str], Replace] = {}
        self._patterns: dict[tuple[Direction, int | None], RunPattern] = {}
        self.metric = metric_function(metric, pair, clean_logits)
        self.clean_value, self.corrupted_value = self.value(clean_logits), self.value(corrupted_logits)

    def capturing(self) -> AbstractContextManager[Any]:
        """Attach the position scheme and capture the model's layers."""
        return self.clean.capturing()

    def unpatched_value(self, direction: Direction) -> float:
        """The metric of the run that is patched."""
        return self.corrupted_value if direction == "denoising" else self.clean_value

    def run_and_source(self, direction: Direction) -> tuple[Replay, Replay]:
        """The run that is patched, and the run that the activations come from."""
        runs = (self.corrupted, self.clean)
        return runs if direction == "denoising" else runs[::-1]

    def value(self, logits: Tensor) -> float:
        """The metric of the logits [n, vocabulary] that predict the answer's tokens."""
        return finite_metric(self.model, self.metric, logits, self.pair.answer)

    def evaluate(
        self, direction: Direction, runs: Sequence[Run], on_progress: Callable[[int], None] | None = None
    ) -> list[float]:
        """The metric of every run with its patches. `on_progress` gets the number of runs after every batch."""
        run, _ = self.run_and_source(direction)
        with torch.no_grad():
            return run.evaluate(runs, self.value, on_progress)

    def estimate(self, direction: Direction, runs: Sequence[Run]) -> list[float]:
        """The estimated change of the metric by the patches of every run."""
        run, _ = self.run_and_source(direction)
        objectives, combine = self.expansion(direction)
        return run.estimate(runs, objectives, lambda products: float(combine(products.sum(1))))

    def expansion(self, direction: Direction) -> tuple[list[Objective], Callable[[Tensor], Tensor]]:
        """Objectives to differentiate, and the estimate from their derivatives [objectives, ...].

        First order is the derivative of the metric. The KL divergence from the clean run has none in the clean run, so
        noising takes its second order, half the Fisher information: the sum over the `CURVATURE_TOKENS` most probable
        tokens v of p(v) <d log p(v), change>^2 / 2.
        """
        if self.metric_name != "kl" or direction == "denoising":
            return [self.metric], lambda derivatives: derivatives[0]
        with torch.no_grad():
            top = self.clean.target_logits()[0].double().softmax(-1).topk(CURVATURE_TOKENS)

        def log_probability(token: Tensor) -> Objective:
            return lambda logits, tokens: logits[0].log_softmax(-1)[token]

        def combine(derivatives: Tensor) -> Tensor:
            weights = top.values.cpu().view(-1, *[1] * (derivatives.dim() - 1))
            return (weights * derivatives.square()).sum(0) / 2

        return [log_probability(token) for token in top.indices], combine

    def patch(
        self, activation: Activation, direction: Direction, units: Sequence[Unit], span: range | None = None
    ) -> Run:
        """The edits that take an activation of units from the other run, at a span of aligned prompt positions.

        A span counts from the first aligned position; None is all aligned positions and the answer's tokens. A patched
        pattern at a position is the attention row of that query. Every activation is that of the unchanged other run,
        in later layers as well, whose inputs the patches of earlier layers change.
        """
        tokens = self._tokens(direction, span)
        heads = tuple(place for unit in units for place in unit.heads(self.model.geometry))
        if activation != "pattern":
            return [Edit(self._values_of(direction, activation), heads, (activation,), tokens)]
        has_indexer = any(True for _ in families.indexers(self.model.module))  # it chooses other keys in each run
        if tokens.tokens is None and self._shift(direction) == 0 and not has_indexer:  # the other q and k give all rows
            names: tuple[ActivationName, ...] = ("q", "k")
            return [Edit(self._values_of(direction, name), heads, (name,), tokens) for name in names]
        return [Edit(self._pattern_of(direction), heads, ("logits",), tokens)]

    def patch_entry(self, direction: Direction, unit: Unit, query: int, key: int) -> Run:
        """The edit that takes one weight of a head from the other run: of a query on a key, by aligned position.

        The row is not normalised again, as in `get_act_patch_attn_head_pattern_dest_src_pos` of TransformerLens.
        """
        run, _ = self.run_and_source(direction)
        first = self.pair.aligned_positions(run.ids).start
        pattern = self._pattern_of(direction, first + key)
        return [Edit(pattern, unit.heads(self.model.geometry), ("logits",), TokenSet((first + query,)))]

    def _values_of(self, direction: Direction, name: ActivationName) -> Replace:
        """The values of the other run, one kind for all runs: edits of one kind are computed together."""
        _, source = self.run_and_source(direction)
        return self._values.setdefault((direction, name), source.source(name, self._shift(direction)))

    def _pattern_of(self, direction: Direction, key: int | None = None) -> RunPattern:
        """The pattern of the other run, or its weights on one key, one kind for all runs."""
        _, source = self.run_and_source(direction)
        pattern = RunPattern(source.records(), self._shift(direction), key)
        return self._patterns.setdefault((direction, key), pattern)

    def estimate_entries(self, direction: Direction) -> list[Tensor]:
        """The estimated change of the metric by every `patch_entry`, [H, n, n] float64 by layer, n aligned positions.

        The gradient with respect to the head's output, times the change of the weight, times the key's value.
        """
        run, source = self.run_and_source(direction)
        objectives, combine = self.expansion(direction)
        records = run.records(), source.records()
        keys = [
            torch.tensor([*self.pair.aligned_positions(replay.ids)][: self.pair.aligned]) for replay in (run, source)
        ]
        estimates = [torch.empty(0)] * self.model.geometry.layers

        def add_layer(layer: int, z: Tensor, call: backend.AttentionCall, gradients: list[Tensor]) -> None:
            weights = []
            for record, own in zip((of_run[layer] for of_run in records), keys, strict=True):
                rows = own - query_range(record).start
                of_rows = record.weights(rows.clamp(min=0).to(record.q.device))[..., own.to(record.q.device)]
                weights.append(of_rows.double() * (rows >= 0).to(of_rows.device)[:, None])  # shared rows do not change
            change, rows = weights[1] - weights[0], keys[0] - self.run_and_source(direction)[0].start
            values = call.v[0].repeat_interleave(len(change) // call.v.shape[1], 0)[:, keys[0].to(z.device)].double()
            computed = (rows >= 0).nonzero()[:, 0].to(z.device)
            derivatives = torch.zeros(len(gradients), *change.shape, dtype=torch.float64, device=z.device)
            for number, gradient in enumerate(gradients):
                products = gradient[0][:, rows.clamp(min=0).to(z.device)].double() @ values.mT
                derivatives[number][:, computed] = (change * products)[:, computed]
            estimates[layer] = combine(derivatives.cpu())

        run.backpropagate(objectives, add_layer)
        return estimates

    def patch_part(self, part: PartName, direction: Direction, layer: int, span: range | None = None) -> Run:
        """The edit that takes a part of a decoder layer from the other run, at a span of aligned prompt positions."""
        _, source = self.run_and_source(direction)
        values = ReplacePart("patched", source.part_values(part), self._shift(direction) - source.start)
        return [Edit(values, ((layer, 0),), (part,), self._tokens(direction, span))]

    def _tokens(self, direction: Direction, span: range | None) -> TokenSet:
        """The tokens of a span in the run that is patched; all of them if nothing is left out."""
        run, _ = self.run_and_source(direction)
        positions = self.pair.aligned_positions(run.ids)
        own = positions if span is None else positions[span.start : span.stop]
        return TokenSet() if len(own) == run.ids.shape[1] else TokenSet(slice(own.start, own.stop))

    def _shift(self, direction: Direction) -> int:
        """What to add to a position of the patched run for the position of the other one that corresponds to it."""
        run, source = (self.pair.aligned_positions(replay.ids) for replay in self.run_and_source(direction))
        return source.start - run.start


class AnswerRuns:
    """The clean prompt of a pair and its answer after a full pass, under the model's scheme.

    `unchanged` is the metric of the unchanged model.
    """

    def __init__(self, model: Model, pair: TokenPair, metric: Metric, memory_bytes: float):
        tokens = PairTokens.on_device(pair, model.device)
        schedule: Any = model.schedule
        self.model, self._answer = model, tokens.answer
        self._replay = Replay(model, schedule, tokens.clean, memory_bytes, len(pair.clean))
        with self.capturing():
            self._replay.record_streams()
            logits = self._replay.target_logits()
        self._metric = metric_function(metric, tokens, logits)
        self.unchanged = self._value(logits)

    def capturing(self) -> AbstractContextManager[Any]:
        """Attach the position scheme and capture the model's layers."""
        return self._replay.capturing()

    def values(self, runs: Sequence[Run], on_progress: Callable[[int], None] | None = None) -> list[float]:
        """The metric of every run. `on_progress` gets the number of runs after every batch."""
        with self.capturing(), torch.no_grad():
            return self._replay.evaluate(runs, self._value, on_progress)

    def _value(self, logits: Tensor) -> float:
        return finite_metric(self.model, self._metric, logits, self._answer)
