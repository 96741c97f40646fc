"""Activation patching of whole layers: the residual stream before a layer, or what its attention or MLP adds to it.

- resid_pre: the residual stream before a decoder layer.
- attn_out, mlp_out: what the layer's attention, or its MLP, adds to the residual stream, after a norm that follows it.

The names and effects are those of TransformerLens (`get_act_patch_block_every`). An exact patch resumes the pass at the
layer, with as many spans of positions as fit in one batch. An estimate is attribution patching (Nanda 2023):
<dm/da, a' - a>, summed over positions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from headscope.decomposition.residual_inspection import decompose_residual_stream
from headscope.forward.capture import capturing
from headscope.forward.carried_state import batch_axis, expand_batch
from headscope.forward.free_memory import runs_per_batch
from headscope.forward.layer_parts import collecting_parts, editing_part
from headscope.forward.replay import Replay
from headscope.patching.activation_patching import Direction, PatchingReplay, span_slice
from headscope.positions.attach import attached
from headscope.positions.model import Model

LayerActivation = Literal["resid_pre", "attn_out", "mlp_out"]
LAYER_ACTIVATIONS: tuple[LayerActivation, ...] = get_args(LayerActivation)

LayerParts = Sequence[Mapping[str, nn.Module]]
"""The modules of every decoder layer whose outputs are attn_out and mlp_out. A layer may lack one or both."""


def inspect_layer_parts(model: Model, ids: Tensor) -> LayerParts:
    """Find the parts of every decoder layer in a short pass over ids [1, L].

    mlp_out is the last branch of a layer beside its attention. A layer without attention needs two branches to have
    one: a single branch may as well be the mixer of a hybrid model. Raises UnsupportedModel for a model whose layers
    return more than their input plus the outputs of their modules.
    """
    schedule: Any = model.schedule
    with torch.no_grad(), attached(model, schedule), capturing(model) as captured:
        decomposition = decompose_residual_stream(model, captured, ids, "patching of layers", allow_scaled_layers=True)
    parts: list[dict[str, nn.Module]] = []
    for layer in decomposition.layers:
        heads, others = layer.attention_branch, layer.other_branches
        modules: dict[str, nn.Module] = {}
        if heads is not None:
            modules["attn_out"] = heads.projected_module if heads.norm is None else heads.norm.module
        if others and (heads is not None or len(others) > 1):
            modules["mlp_out"] = others[-1].module
        parts.append(modules)
    return parts


class LayerPatching:
    """Patches and estimates of the layers of a `PatchingReplay`, inside its `capturing`.

    `parts` are needed for attn_out and mlp_out. Spans count from the first aligned position; None is all aligned
    positions and the answer's tokens.
    """

    def __init__(self, replay: PatchingReplay, parts: LayerParts | None = None):
        self.replay = replay
        self.parts: LayerParts = [{} for _ in replay.clean.layers] if parts is None else parts

    def layers(self, activation: LayerActivation) -> list[int]:
        """The decoder layers that have this activation."""
        return [n for n, modules in enumerate(self.parts) if activation == "resid_pre" or activation in modules]

    def patch(
        self, activation: LayerActivation, direction: Direction, layers: Iterable[int], spans: Sequence[range | None]
    ) -> Iterator[tuple[int, range | None, float]]:
        """The metric with the activation of one layer patched at a time, at each span of positions."""
        run, source = self.replay.run_and_source(direction)
        batch_size = runs_per_batch(self.replay.model, run.ids.shape[1])
        for layer in layers:
            new = self._value(source, layer, activation)
            for first in range(0, len(spans), batch_size):
                batch = spans[first : first + batch_size]
                if activation == "resid_pre":
                    stream = expand_batch(run.residual_stream_before(layer), len(batch))
                    all_logits = run.target_logits_from(layer, self._patched(stream, new, batch, direction))
                else:
                    all_logits = self._logits_with_part(self.parts[layer][activation], layer, new, batch, direction)
                for span, logits in zip(batch, all_logits, strict=True):
                    yield layer, span, self.replay.value(logits)

    def estimate(
        self, activations: Sequence[LayerActivation], direction: Direction, spans: Sequence[range | None]
    ) -> dict[LayerActivation, Tensor]:
        """Estimated change of the metric for every layer and span, float64: [layers, spans].

        Layers that lack the activation have zeros.
        """
        run, source = self.replay.run_and_source(direction)
        objectives, combine = self.replay.expansion(direction)
        estimates = {name: torch.zeros(len(run.layers), len(spans), dtype=torch.float64) for name in activations}
        rows, source_rows = self._places(direction, None)
        length = run.ids.shape[1]

        def add(layer: int, old: Tensor, name: Any, gradients: list[Tensor]) -> None:
            new = self._value(source, layer, name)
            old, *gradients = (_by_position(t, length)[..., rows, :].float() for t in (old, *gradients))
            change = _by_position(new, source.ids.shape[1])[..., source_rows, :].float() - old
            products = torch.stack(
                [(change * gradient).sum(-1).view(-1, change.shape[-2]).sum(0).double() for gradient in gradients]
            )
            derivatives = torch.stack([products[:, span_slice(span)].sum(-1) for span in spans], -1)
            estimates[name][layer] = combine(derivatives[:, None])[0].cpu()

        def add_stream(layer: int, gradients: list[Tensor]) -> None:
            if "resid_pre" in estimates:
                add(layer, run.residual_stream_before(layer), "resid_pre", gradients)

        wanted: list[dict[str, nn.Module]]
        wanted = [{name: part for name, part in modules.items() if name in activations} for modules in self.parts]
        run.backpropagate_streams(objectives, wanted, add_stream, add)
        return estimates

    def _value(self, replay: Replay, layer: int, activation: str) -> Tensor:
        """An activation of a layer in an unchanged run."""
        stream = replay.residual_stream_before(layer)
        if activation == "resid_pre":
            return stream
        with torch.no_grad(), collecting_parts({activation: self.parts[layer][activation]}) as collected:
            replay.run_layer(layer, stream)
        ((value, _),) = collected
        return value

    def _logits_with_part(
        self, module: nn.Module, layer: int, new: Tensor, spans: Sequence[range | None], direction: Direction
    ) -> Tensor:
        """The target logits [B, n, vocabulary] of runs with a module's output patched at one span each."""
        run, _ = self.replay.run_and_source(direction)
        length = run.ids.shape[1]

        def edit(hidden: Tensor) -> Tensor:
            by_run = hidden.reshape(len(spans), length, -1)
            return self._patched(by_run, _by_position(new, -1), spans, direction).view_as(hidden)

        with editing_part(module, edit):
            return run.target_logits_from(layer, expand_batch(run.residual_stream_before(layer), len(spans)))

    def _patched(self, runs: Tensor, new: Tensor, spans: Sequence[range | None], direction: Direction) -> Tensor:
        """Activations of one run per span, with those at its span taken from `new`, the activation of the source."""
        axis = batch_axis(new)
        assert axis is not None
        patched = runs.clone()
        for number, span in enumerate(spans):
            rows, source_rows = self._places(direction, span)
            patched.narrow(axis, number, 1)[..., rows, :] = new[..., source_rows, :]
        return patched

    def _places(self, direction: Direction, span: range | None) -> tuple[slice, slice]:
        """The positions of a span in the run that is patched and in the other one."""
        aligned = (self.replay.pair.aligned_positions(replay.ids) for replay in self.replay.run_and_source(direction))
        run, source = (positions[span_slice(span)] for positions in aligned)
        return slice(run.start, run.stop), slice(source.start, source.stop)


def _by_position(hidden: Tensor, length: int) -> Tensor:
    """Hidden states of one run as [1, L, D]: some feed-forward modules return [L, D]."""
    return hidden.reshape(1, length, hidden.shape[-1]) if hidden.dim() == 2 else hidden
