"""Activation patching: run one prompt of a pair with one head's activation taken from the run of the other prompt.

Denoising runs the corrupted prompt with an activation of the clean run; noising runs the clean prompt with one of the
corrupted run. The patched activation is z (head output before o_proj), q or k (after rotation and norms), v, or the
attention pattern. An exact effect resumes the forward pass at the head's layer. An estimate is attribution patching
(Nanda 2023): <dm/dz, z' - z>, summed over positions, where z' is the head's output with the patched activation. z' is
computed exactly, softmax included, so that a saturated softmax does not bias the estimate (AtP*, Kramar et al. 2024).
The KL divergence has no first order in the clean run; noising estimates its second order.

Both prompts are followed by the answer's tokens, and metrics read the logits that predict these tokens. A pair may have
another corrupted answer after its corrupted prompt; the metrics score the answer there as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.forward.free_memory import in_batches, runs_per_batch
from headscope.forward.interventions import Unit, head_units, kv_group_units
from headscope.forward.replay import Objective, Replay
from headscope.patching.metrics import Metric, PairTokens, finite_metric, metric_function
from headscope.positions.model import Model
from headscope.prompts.pairs import stored_metric_name

Activation = Literal["z", "q", "k", "v", "pattern"]
Direction = Literal["denoising", "noising"]

GROUP_ACTIVATIONS = ("k", "v")
"""Activations that all query heads of a KV group share."""
CURVATURE_TOKENS = 8
"""Next tokens of a second-order estimate, each with a backward pass [ours]."""


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The head outputs z [1, H, L, d] of one attention layer in one run, and the call that computed them."""

    z: Tensor
    call: backend.AttentionCall

    def copies(self, count: int) -> "LayerAttention":
        """The same run `count` times, as a batch."""
        indices = torch.zeros(count, dtype=torch.long, device=self.z.device)
        return LayerAttention(self.z[indices], self.call.for_sequences(indices))


def patched_outputs(
    activation: Activation,
    run: LayerAttention,
    source: LayerAttention,
    positions: Sequence[range],
    source_positions: Sequence[range],
) -> Tensor:
    """The head outputs [B, H, L, d] of a layer in B runs, when in run b `positions[b]` of an activation come from
    `source_positions[b]`.

    `run` has these B runs, or one for all; `source` has one. Each head's output is the one with only that head (for k
    and v: its KV group) patched, because heads of one layer do not affect each other's output. A patched pattern at a
    position is the attention row of that query.
    """
    count = len(positions)
    runs = run.copies(count) if len(run.z) < count else run

    def replace_positions(t: Tensor, new: Tensor) -> Tensor:
        patched = t.clone()
        for number, (rows, source_rows) in enumerate(zip(positions, source_positions, strict=True)):
            source_run = number if len(new) > 1 else 0
            patched[number, :, rows.start : rows.stop] = new[source_run, :, source_rows.start : source_rows.stop]
        return patched

    call, source_call = runs.call, source.call
    if activation == "z":
        return replace_positions(runs.z, source.z)
    if activation == "q":
        return call.attend(replace_positions(call.q, source_call.q), call.k, call.v)
    if activation == "k":
        return call.attend(call.q, replace_positions(call.k, source_call.k), call.v)
    if activation == "v":
        return call.attend(call.q, call.k, replace_positions(call.v, source_call.v))
    sources = source.copies(count).call
    return replace_positions(runs.z, sources.attend(sources.q, sources.k, call.v))


def patched_units(model: Model, activation: Activation) -> list[Unit]:
    """The units that are patched one at a time: KV groups for k and v, else query heads."""
    return (kv_group_units if activation in GROUP_ACTIVATIONS else head_units)(model.geometry)


class PatchingReplay:
    """The clean and the corrupted run of a prompt pair; methods patch one of them with activations of the other.

    `clean_value` and `corrupted_value` are the metric in the two unchanged runs. Call every method inside `capturing`.
    Memory holds the residual streams of both runs (the first `memory_bytes`; the rest is on disk) and the activations
    of one layer. Prompts of different lengths allow only z and v: q and k are rotated by their positions. Raises
    BadInput if the metric is not finite.
    """

    def __init__(self, model: Model, pair: PairTokens, metric: Metric, memory_bytes: float):
        self.model, self.pair, self.metric_name = model, pair, stored_metric_name(metric)
        schedule: Any = model.schedule
        first_targets = (ids.shape[1] - len(pair.answer) for ids in (pair.clean, pair.corrupted))
        self.clean, self.corrupted = (
            Replay(model, schedule, ids, memory_bytes / 2, first_target, pair.answer)
            for ids, first_target in zip((pair.clean, pair.corrupted), first_targets, strict=True)
        )
        with self.capturing():
            for replay in (self.clean, self.corrupted):
                replay.record_streams()
            clean_logits, corrupted_logits = (replay.target_logits({}) for replay in (self.clean, self.corrupted))
        self.metric = metric_function(metric, pair, clean_logits)
        self.clean_value, self.corrupted_value = self.value(clean_logits), self.value(corrupted_logits)

    def capturing(self) -> AbstractContextManager[Any]:
        """Attach the position scheme and capture the model's layers."""
        return self.clean.capturing()

    def estimate(
        self, activations: Sequence[Activation], direction: Direction, spans: Sequence[range | None]
    ) -> dict[Activation, Tensor]:
        """Estimated change of the metric for every unit and span, float64: [layers, units, spans].

        Spans are those of `patch`. Layers with fewer KV groups than others leave zeros.
        """
        run, source = self.run_and_source(direction)
        positions, source_positions = self.pair.aligned_positions(run.ids), self.pair.aligned_positions(source.ids)
        geometry = self.model.geometry
        estimates = {
            activation: torch.zeros(
                geometry.layers,
                geometry.kv_groups if activation in GROUP_ACTIVATIONS else geometry.heads,
                len(spans),
                dtype=torch.float64,
            )
            for activation in activations
        }

        def add_layer(layer: int, z: Tensor, call: backend.AttentionCall, gradients: list[Tensor]) -> None:
            run_attention, source_attention = LayerAttention(z, call), LayerAttention(*source.attention(layer))

            def products(activation: Activation, span: slice) -> Tensor:
                """<gradient, z' - z> of every objective, head and position, [objectives, H, L], float64."""
                outputs = patched_outputs(
                    activation, run_attention, source_attention, [positions[span]], [source_positions[span]]
                )
                change = outputs.float() - z.float()
                return torch.stack([(change * gradient.float()).sum(-1)[0].double() for gradient in gradients])

            for activation, estimate in estimates.items():
                if activation in GROUP_ACTIVATIONS:  # a patched key or value changes all later rows
                    by_span = [products(activation, span_slice(span)).sum(-1) for span in spans]
                    changes = torch.stack(by_span, -1)
                    changes = changes.view(len(changes), geometry.layer_kv_groups[layer], -1, len(spans)).sum(2)
                else:
                    by_position = products(activation, slice(None))[..., positions.start : positions.stop]
                    changes = torch.stack([by_position[..., span_slice(span)].sum(-1) for span in spans], -1)
                estimate[layer, : changes.shape[1]] = combine(changes).cpu()

        objectives, combine = self.expansion(direction)
        run.backpropagate(objectives, add_layer)
        return estimates

    def expansion(self, direction: Direction) -> tuple[list[Objective], Callable[[Tensor], Tensor]]:
        """Objectives to differentiate, and the estimate from their derivatives [objectives, ...].

        First order is the derivative of the metric. The KL divergence from the clean run has none in the clean run, so
        noising takes its second order, half the Fisher information: the sum over the `CURVATURE_TOKENS` most probable
        tokens v of p(v) <d log p(v), change>^2 / 2.
        """
        if self.metric_name != "kl" or direction == "denoising":
            return [self.metric], lambda derivatives: derivatives[0]
        with torch.no_grad():
            top = self.clean.target_logits({})[0].double().softmax(-1).topk(CURVATURE_TOKENS)

        def log_probability(token: Tensor) -> Objective:
            return lambda logits, tokens: logits[0].log_softmax(-1)[token]

        weights = top.values[:, None, None]
        return [
            log_probability(token) for token in top.indices
        ], lambda derivatives: (weights * derivatives.square()).sum(0) / 2

    def patch(
        self, activation: Activation, direction: Direction, units: Sequence[Unit], spans: Sequence[range | None]
    ) -> Iterator[tuple[Unit, range | None, float]]:
        """The metric with one unit patched at a time, at each span of aligned prompt positions.

        A span counts from the first aligned position; None is all aligned positions and the answer's tokens. Replays as
        many units and spans of a layer at once as fit the memory.
        """
        run, source = self.run_and_source(direction)
        batch_size = runs_per_batch(self.model, run.ids.shape[1])
        for layer in sorted({unit.layer for unit in units}):
            run_attention, source_attention = (LayerAttention(*replay.attention(layer)) for replay in (run, source))
            layer_units = [unit for unit in units if unit.layer == layer]
            for places in in_batches(spans, max(1, batch_size // len(layer_units))):
                outputs = patched_outputs(
                    activation, run_attention, source_attention, *self._positions(direction, places)
                )
                for batch in in_batches([*product(range(len(places)), layer_units)], batch_size):
                    variants = [
                        _with_heads(run_attention.z, outputs[place : place + 1], unit.head_slice(self.model.geometry))
                        for place, unit in batch
                    ]
                    all_logits = run.target_logits_of(layer, torch.cat(variants))
                    for (place, unit), logits in zip(batch, all_logits, strict=True):
                        yield unit, places[place], self.value(logits)

    def patch_together(
        self, activation: Activation, direction: Direction, units: Sequence[Unit], spans: Sequence[range | None]
    ) -> Iterator[tuple[range | None, float]]:
        """The metric with all units patched at once, at each span of aligned prompt positions.

        Every activation is that of the unchanged source run, in later layers as well, whose inputs the patches of
        earlier layers change. Memory holds the attention activations of all patched layers of the source. Replays as
        many spans at once as fit the memory.
        """
        run, source = self.run_and_source(direction)
        layers = sorted({unit.layer for unit in units})
        sources = {layer: LayerAttention(*source.attention(layer)) for layer in layers}

        def edit(layer: int, places: Sequence[range | None]) -> backend.OutputEdit:
            heads = [unit.head_slice(self.model.geometry) for unit in units if unit.layer == layer]

            def patch(z: Tensor, call: backend.AttentionCall) -> Tensor:
                outputs = patched_outputs(
                    activation, LayerAttention(z, call), sources[layer], *self._positions(direction, places)
                )
                for chosen in heads:
                    z = _with_heads(z, outputs, chosen)
                return z

            return patch

        for places in in_batches(spans, runs_per_batch(self.model, run.ids.shape[1])):
            edits = {layer: edit(layer, places) for layer in layers}
            for span, logits in zip(places, run.target_logits_of_edits(edits, len(places)), strict=True):
                yield span, self.value(logits)

    def _positions(self, direction: Direction, spans: Sequence[range | None]) -> tuple[list[range], list[range]]:
        """The positions of spans in the run that is patched, and in the other one."""
        aligned = (self.pair.aligned_positions(replay.ids) for replay in self.run_and_source(direction))
        run, source = ([positions[span_slice(span)] for span in spans] for positions in aligned)
        return run, source

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


def span_slice(span: range | None) -> slice:
    """The span as a slice; None is all positions."""
    return slice(None) if span is None else slice(span.start, span.stop)


def _with_heads(z: Tensor, outputs: Tensor, heads: slice) -> Tensor:
    """Head outputs [B, H, L, d] with some heads taken from `outputs`."""
    patched = z.clone()
    patched[:, heads] = outputs[:, heads]
    return patched
