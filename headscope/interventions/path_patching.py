"""Path patching: change what one head sends to one later head, or to a set of later heads, and nothing else.

A path leads from a sender head to the queries, keys or values of receiver heads in later layers, or to the logits. The
sender's output z is taken from the source run of a prompt pair. All other heads keep their outputs. The MLPs between
the sender and a receiver either keep their outputs too (`mlps` "frozen": the direct effect through the residual stream,
as `get_act_patch_direct_path` of TransformerLens has it), or run on what the sender changes ("recomputed": the path
patching of Wang et al. 2022, appendix B, where a path may pass through MLPs). A path in the sense of Goldowsky-Dill et
al. 2023 goes through no MLP that it does not name, as with "frozen".

Only the receivers' q, k or v follow this change, not those of other heads, even in the same KV group. The receivers'
outputs are computed from them in one run, and the rest of the model runs normally. The norm before a receiver or the
logits is frozen at its scale in the patched run, or recomputed, as in both papers; a norm of q or k within the
attention always runs.

An estimate is the gradient of the metric with respect to the receiver's q, k or v, pulled back to the residual stream,
times the sender's change: all pairs of heads for the cost of a few passes. It has frozen MLPs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.attention.edits import TokenSet
from headscope.decomposition.residual_decomposition import AttentionBranch, DecompositionError, Norm
from headscope.decomposition.residual_inspection import MAX_INSPECTED_TOKENS, decompose_residual_stream, input_norms
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.backbone import separately_runnable_layers
from headscope.forward.capture import capturing, trial_pass
from headscope.forward.free_memory import runs_per_batch
from headscope.forward.logits import replacing_forward
from headscope.forward.stream_store import ResidualStreamStore
from headscope.interventions.edits import Edit
from headscope.interventions.kinds import Replace
from headscope.interventions.pair_runs import Direction, PairRuns
from headscope.positions.attach import attached
from headscope.positions.model import Model

PathEnd = Literal["q", "k", "v", "logits"]
"""Where a path ends: in an input of the receiver, or in the logits."""
ReceiverInput = Literal["q", "k", "v"]
RECEIVER_INPUTS: tuple[ReceiverInput, ...] = get_args(ReceiverInput)
Norms = Literal["frozen", "recomputed"]
MLPs = Literal["frozen", "recomputed"]
LayerIndexHead = tuple[int, int]
"""Index of an attention layer, and query head."""
PathSpan = tuple[int, ...]
"""The first position and the one after the last, counted from the first aligned one; () for all."""
PathOrigin = tuple[LayerIndexHead, PathSpan]
ESTIMATE_TOKENS = 2**15
"""Tokens of the copies of a residual stream, one per receiver, whose gradients are computed as one batch."""


@dataclass(frozen=True, order=True)
class Path:
    """A path from a sender to the q, k or v of receivers in later layers together, or to the logits without any.

    The sender changes, and the receivers' inputs follow, at `sender_span` and `receiver_span` only.
    """

    sender: LayerIndexHead
    receivers: tuple[LayerIndexHead, ...]
    end: PathEnd
    sender_span: PathSpan = ()
    receiver_span: PathSpan = ()

    @property
    def origin(self) -> "PathOrigin":
        """The sender and the positions at which it changes."""
        return self.sender, self.sender_span

    @property
    def receiver_layers(self) -> tuple[int, ...]:
        """The attention layers of the receivers, lowest first."""
        return tuple(sorted({layer for layer, _ in self.receivers}))


@dataclass(frozen=True, eq=False)
class PathModel:
    """Where the heads of a model write to the residual stream and read from it, by index of the attention layer.

    `input_norms` are the norms between the residual stream and the attention, None where there is none.
    """

    branches: tuple[AttentionBranch, ...]
    input_norms: tuple[Norm | None, ...]
    final_norm: Norm


def inspect_paths(model: Model, ids: Tensor) -> PathModel:
    """Inspect a model in a short pass over ids [1, L].

    Raises UnsupportedModel for a model whose heads do not write to and read from one residual stream, or whose heads'
    outputs are gated.
    """
    schedule: Any = model.schedule
    layers = separately_runnable_layers(model)
    with torch.no_grad(), attached(model, schedule), capturing(model) as captured:
        decomposition = decompose_residual_stream(model, captured, ids, "path patching")
        branches = {
            layer.attention_branch.layer_index: layer.attention_branch
            for layer in decomposition.layers
            if layer.attention_branch is not None
        }
        if decomposition.soft_cap is not None:
            raise _unsupported(model, "its logits are soft-capped")
        if any(branch.is_gated for branch in branches.values()):
            raise _unsupported(model, "its heads' outputs are multiplied by a gate before the projection")
        try:
            with trial_pass():
                norms = (*input_norms(model, layers, ids[:, :MAX_INSPECTED_TOKENS]),)
        except DecompositionError as error:
            raise _unsupported(model, str(error)) from error
    return PathModel(tuple(branches[index] for index in sorted(branches)), norms, decomposition.final_norm)


def _unsupported(model: Model, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"path patching is not possible for {model.name}: {reason}. Use activation patching (headscope patch), or "
        "another model"
    )


class PathPatching:
    """Path patches of one run of a prompt pair. Create and use it inside `replay.capturing`.

    `model_paths` is the model's `inspect_paths`. `mlps`: whether the MLPs between a sender and a receiver keep their
    outputs. Memory holds the change of every head's output (the first `memory_bytes`; the rest is on disk).
    """

    def __init__(
        self,
        replay: PairRuns,
        model_paths: PathModel,
        direction: Direction,
        norms: Norms = "frozen",
        memory_bytes: float = 2**30,
        mlps: MLPs = "frozen",
    ):
        self.replay, self.model_paths, self.norms, self.mlps = replay, model_paths, norms, mlps
        self.run, source = replay.run_and_source(direction)
        self._changes = ResidualStreamStore(memory_bytes)
        self._write_scales: list[Tensor | None] = []
        self._aligned, source_rows = (
            self._computed(replay.pair.aligned_positions(text.ids), text.start) for text in (self.run, source)
        )
        positions, source_positions = (slice(rows.start, rows.stop) for rows in (self._aligned, source_rows))
        for layer, branch in enumerate(model_paths.branches):
            z = self.run.attention(layer)[0]
            change = torch.zeros_like(z[0])
            change[:, positions] = source.attention(layer)[0][0, :, source_positions] - z[0, :, positions]
            self._changes.append(change)
            self._write_scales.append(None if branch.norm is None else self._scales_after(layer, branch.norm))

    @staticmethod
    def _computed(positions: range, start: int) -> range:
        """The rows of positions among those that a run computes, which begin after a shared prefix."""
        return range(max(positions.start - start, 0), positions.stop - start)

    def patch(self, paths: Sequence[Path]) -> Iterator[tuple[Path, float]]:
        """The metric with one path patched at a time, by the layers of the receivers, the logits last.

        Raises BadInput for a receiver that is not in a later layer than its sender.
        """
        by_layers: dict[tuple[int, ...], list[Path]] = defaultdict(list)
        for path in sorted(paths):
            if path.receivers and path.receiver_layers[0] <= path.sender[0]:
                raise BadInput(
                    f"{path}: a receiver is not in a later layer than the sender. Use receivers of later layers"
                )
            by_layers[path.receiver_layers].append(path)
        direct = by_layers.pop((), [])
        batch = runs_per_batch(self.run.model, self.run.ids.shape[1])
        for _, members in sorted(by_layers.items()):
            for first in range(0, len(members), batch):
                yield from self._patch_receivers(members[first : first + batch])
        for first in range(0, len(direct), batch):
            yield from self._patch_logits(direct[first : first + batch])

    def estimate(self) -> tuple[Tensor, Tensor]:
        """Estimated change of the metric, float64.

        [layers, H, layers, H, 3] by sender, receiver and q, k or v, zero where the receiver is not in a later layer,
        and [layers, H] by sender for the direct path to the logits. Layers with fewer heads than others leave zeros.
        Raises BadInput with recomputed MLPs.
        """
        if self.mlps == "recomputed":
            raise BadInput("paths are estimated with frozen MLPs only. Patch them exactly, or use mlps 'frozen'")
        geometry = self.replay.model.geometry
        shape = (geometry.layers, geometry.heads)
        to_heads = torch.zeros(*shape, *shape, len(RECEIVER_INPUTS), dtype=torch.float64)
        to_logits = torch.zeros(shape, dtype=torch.float64)

        def add_layer(layer: int, z: Tensor, call: backend.AttentionCall, gradients: list[Tensor]) -> None:
            for heads, pulled_back in self._stream_gradients(layer, call, gradients[0]):
                for sender_layer in range(layer):
                    written = self._written(sender_layer).to(pulled_back.device)
                    products = torch.einsum("hld,nrld->hnr", written, pulled_back)
                    to_heads[sender_layer, : len(written), layer, heads] = products.double().cpu()

        self.run.backpropagate([self.replay.metric], add_layer)
        gradient = self._logit_gradient()
        for layer in range(geometry.layers):
            written = self._written(layer).to(gradient.device)
            to_logits[layer, : len(written)] = torch.einsum("hld,ld->h", written, gradient).double().cpu()
        return to_heads, to_logits

    def _patch_receivers(self, paths: Sequence[Path]) -> Iterator[tuple[Path, float]]:
        """Patch paths whose receivers are in the same layers: one batch of runs.

        The receivers' inputs follow the change of an origin; their other inputs are those of the run that is edited.
        """
        origins = sorted({path.origin for path in paths})
        layers = {self.run.decoder_layer_of(layer): layer for layer in paths[0].receiver_layers}
        changed = {
            layers[decoder_layer]: self._attention(layers[decoder_layer], streams)[1]
            for decoder_layer, streams in self._changed_streams(origins, [*layers]).items()
        }
        runs = [
            [
                Edit(
                    self._input_of(changed[layer], path.end, layer, origins.index(path.origin)),
                    tuple(place for place in path.receivers if place[0] == layer),
                    (path.end,),
                    self._tokens(path.receiver_span),
                )
                for layer in path.receiver_layers
            ]
            for path in paths
        ]
        yield from zip(paths, self.run.evaluate(runs, self.replay.value), strict=True)

    def _input_of(self, call: backend.AttentionCall, name: str, layer: int, copy: int) -> Replace:
        """The q, k or v of one sequence of a call, as the values of an edit."""
        tensor: Tensor = getattr(call, name)[copy]
        is_of_keys = name != "q"
        shift = 0 if is_of_keys else -self.run.start
        return Replace("changed input", {layer: tensor}, (name,), shift, tensor.shape[1])

    def _tokens(self, span: PathSpan) -> TokenSet:
        """The tokens of a span, counted from the first aligned position; all for ()."""
        if not span:
            return TokenSet()
        first = self.replay.pair.aligned_positions(self.run.ids)[slice(*span)]
        return TokenSet(slice(first.start, first.stop))

    def _patch_logits(self, paths: Sequence[Path]) -> Iterator[tuple[Path, float]]:
        """Patch paths to the logits."""
        last = len(self.run.layers)
        streams = self._changed_streams([path.origin for path in paths], [last])[last]
        with self._freezing(self.model_paths.final_norm, self._last_stream()):
            all_logits = self.run.target_logits_after(streams)
            values = [self.replay.value(logits) for logits in all_logits]
        yield from zip(paths, values, strict=True)

    def _stream_gradients(
        self, layer: int, call: backend.AttentionCall, z_gradient: Tensor
    ) -> Iterator[tuple[slice, Tensor]]:
        """Gradients of the metric by the residual stream before a layer, through the q, k or v of one head each.

        Yields heads and their gradients [n, 3, L, D].
        """
        heads_per_group = call.q.shape[1] // call.k.shape[1]
        with torch.enable_grad():
            q = call.q.detach().requires_grad_()
            k, v = (t.detach().repeat_interleave(heads_per_group, 1).requires_grad_() for t in (call.k, call.v))
            input_gradients = torch.autograd.grad(call.attend(q, k, v), (q, k, v), z_gradient)
            batch = max(1, ESTIMATE_TOKENS // q.shape[2])
            for first in range(0, q.shape[1], batch):
                heads = range(first, min(first + batch, q.shape[1]))
                stream = self._stream_before(layer)
                streams = stream.expand(len(heads), -1, -1).clone().requires_grad_()
                new_call = self._attention(layer, streams)[1]
                pulled_back: list[Tensor] = []
                for name, gradient in zip(RECEIVER_INPUTS, input_gradients, strict=True):
                    tensor: Tensor = getattr(new_call, name)
                    seed = torch.zeros_like(tensor)
                    for copy, head in enumerate(heads):
                        seed[copy, head * tensor.shape[1] // q.shape[1]] = gradient[0, head]
                    pulled_back += torch.autograd.grad(tensor, streams, seed, retain_graph=name != "v")
                yield slice(heads.start, heads.stop), torch.stack(pulled_back, 1).float()

    def _logit_gradient(self) -> Tensor:
        """Gradient [L, D] of the metric with respect to the output of the last layer."""
        with torch.enable_grad(), self._freezing(self.model_paths.final_norm, self._last_stream()):
            stream = self._last_stream().detach().requires_grad_()
            hidden = self.run.final_hidden_states(stream)
            (seed,) = self.run.hidden_gradients(hidden.detach(), [self.replay.metric])
            (gradient,) = torch.autograd.grad(hidden, stream, seed)
        return gradient[0].float()

    def _stream_before(self, layer: int) -> Tensor:
        """The residual stream [1, L, D] before an attention layer."""
        return self.run.residual_stream_before(self.run.decoder_layer_of(layer))

    def _last_stream(self) -> Tensor:
        """The output of the last layer [1, L, D]."""
        return self.run.residual_stream_before(len(self.run.layers))

    def _changed_streams(self, origins: Sequence[PathOrigin], decoder_layers: Sequence[int]) -> Mapping[int, Tensor]:
        """The residual streams before decoder layers, with the change of one sender each, [n, L, D]."""
        if self.mlps == "recomputed":
            return self._streams_through_mlps(origins, decoder_layers)
        by_layer = {layer: self._written(layer) for layer in {layer for (layer, _), _ in origins}}
        changes = [self._limited(by_layer[layer][head], span) for (layer, head), span in origins]
        streams = {layer: self.run.residual_stream_before(layer) for layer in decoder_layers}
        return {
            layer: stream + torch.stack([change.to(stream) for change in changes]) for layer, stream in streams.items()
        }

    def _streams_through_mlps(
        self, origins: Sequence[PathOrigin], decoder_layers: Sequence[int]
    ) -> Mapping[int, Tensor]:
        """The same streams in a pass in which only the heads' outputs are frozen (Wang et al. 2022, appendix B)."""
        first = min(layer for (layer, _), _ in origins)
        own = self.run.source("z", kind_name="frozen")
        geometry = self.replay.model.geometry
        heads = [
            (layer, head) for layer in range(first, geometry.layers) for head in range(geometry.layer_heads[layer])
        ]
        runs = []
        for sender, span in origins:
            change = self._limited(self._changes.load(sender[0])[sender[1]], span)
            changed = self.run.activations("z")[sender[0]] + change
            values = Replace("changed output", {sender[0]: changed}, ("z",), own.shift, own.length)
            frozen = tuple(place for place in heads if place != sender)
            runs.append([Edit(own, frozen, ("z",)), Edit(values, (sender,), ("z",))])
        order = sorted(range(len(runs)), key=lambda number: self.run.first_layer(runs[number]))
        streams = self.run.streams_before(decoder_layers, [runs[number] for number in order])
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__))
        return {layer: stream[back.to(stream.device)] for layer, stream in streams.items()}

    def _is_in(self, span: PathSpan) -> Tensor:
        """Which rows [n] of the run are in a span."""
        positions = torch.arange(self.run.start, self.run.ids.shape[1])
        own = self.replay.pair.aligned_positions(self.run.ids)
        chosen = own[slice(*span)] if span else range(self.run.ids.shape[1])
        return (positions >= chosen.start) & (positions < chosen.stop)

    def _limited(self, change: Tensor, span: PathSpan) -> Tensor:
        """A change [L, n] at the positions of a span, and 0 elsewhere."""
        return change * self._is_in(span).to(change)[:, None]

    def _written(self, layer: int) -> Tensor:
        """What each head of a layer adds to the residual stream in the source run minus the patched run, [H, L, D]."""
        branch, change = self.model_paths.branches[layer], self._changes.load(layer)
        projection = branch.projection.float().view(-1, len(change), change.shape[-1])
        written = branch.factor * torch.einsum("hld,khd->hlk", change.float(), projection)
        scales = self._write_scales[layer]
        return written if branch.norm is None or scales is None else branch.norm.linear(written) / scales[:, None]

    def _attention(self, layer: int, streams: Tensor) -> tuple[Tensor, backend.AttentionCall]:
        """The head outputs and the call of a layer that reads these residual streams [B, L, D]."""
        with self._freezing(self.model_paths.input_norms[layer], self._stream_before(layer)):
            return self.run.attention(layer, streams)

    def _freezing(self, norm: Norm | None, inputs: Tensor) -> AbstractContextManager[None]:
        """Freeze a norm at its scale for `inputs` [1, L, D], if norms are frozen."""
        if norm is None or self.norms == "recomputed":
            return nullcontext()
        with torch.no_grad():
            outputs: Tensor = norm.module(inputs)
            scales = norm.scales(inputs[0], outputs[0])[:, None]

        def frozen(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            change = norm.linear((hidden.to(outputs) - inputs.to(outputs)).float()) / scales
            return (outputs.float() + change).to(outputs.dtype)

        return replacing_forward(norm.module, frozen)

    def _scales_after(self, layer: int, norm: Norm) -> Tensor:
        """The divisors [L] of a norm after the attention of a layer, in the patched run."""
        calls: list[tuple[Tensor, Tensor]] = []

        def record(module: nn.Module, args: Any, output: Tensor) -> None:
            calls.append((args[0][0], output[0]))

        handle = norm.module.register_forward_hook(record)
        try:
            self.run.run_layer(self.run.decoder_layer_of(layer), self._stream_before(layer))
        finally:
            handle.remove()
        return norm.scales(*calls[0])
