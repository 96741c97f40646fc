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
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.decomposition.residual_decomposition import AttentionBranch, DecompositionError, Norm
from headscope.decomposition.residual_inspection import MAX_INSPECTED_TOKENS, decompose_residual_stream, input_norms
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing, trial_pass
from headscope.forward.free_memory import runs_per_batch
from headscope.forward.logits import replacing_forward
from headscope.forward.single_layers import separately_runnable_layers
from headscope.forward.stream_store import ResidualStreamStore
from headscope.patching.activation_patching import Direction, PatchingReplay
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
    outputs. Memory holds the change of every head's output (the first `memory_bytes`; the rest is on disk), and with
    recomputed MLPs every head's output (likewise).
    """

    def __init__(
        self,
        replay: PatchingReplay,
        model_paths: PathModel,
        direction: Direction,
        norms: Norms = "frozen",
        memory_bytes: float = 2**30,
        mlps: MLPs = "frozen",
    ):
        self.replay, self.model_paths, self.norms, self.mlps = replay, model_paths, norms, mlps
        self.run, source = replay.run_and_source(direction)
        self._changes, self._outputs = ResidualStreamStore(memory_bytes), ResidualStreamStore(memory_bytes)
        self._write_scales: list[Tensor | None] = []
        self._aligned = replay.pair.aligned_positions(self.run.ids)
        positions, source_positions = (
            slice(span.start, span.stop) for span in (self._aligned, replay.pair.aligned_positions(source.ids))
        )
        for layer, branch in enumerate(model_paths.branches):
            z = self.run.attention(layer)[0]
            change = torch.zeros_like(z[0])
            change[:, positions] = source.attention(layer)[0][0, :, source_positions] - z[0, :, positions]
            self._changes.append(change)
            if mlps == "recomputed":
                self._outputs.append(z)
            self._write_scales.append(None if branch.norm is None else self._scales_after(layer, branch.norm))

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
        """Patch paths whose receivers are in the same layers: one batch of runs."""
        origins = sorted({path.origin for path in paths})
        layers = {self.run.decoder_layer_of(layer): layer for layer in paths[0].receiver_layers}
        edits = {}
        for decoder_layer, streams in self._changed_streams(origins, [*layers]).items():
            layer = layers[decoder_layer]
            changed = self._attention(layer, streams)[1]
            edits[layer] = self._receiver_edit(layer, changed, paths, [origins.index(path.origin) for path in paths])
        if len(edits) == 1:  # no receiver before this layer changes its inputs
            ((layer, edit),) = edits.items()
            edits = {layer: _constant(edit(*self.run.attention(layer)))}
        for path, logits in zip(paths, self.run.target_logits_of_edits(edits, len(paths)), strict=True):
            yield path, self.replay.value(logits)

    def _receiver_edit(
        self, layer: int, changed: backend.AttentionCall, paths: Sequence[Path], copies: Sequence[int]
    ) -> backend.OutputEdit:
        """The edit of a layer's head outputs, one run for each path, that gives its receivers their changed input.

        `changed` has the inputs of the layer with the change of one origin each, that of a path at its number in
        `copies`. The receivers' other inputs are those of the run that is edited.
        """
        geometry = self.replay.model.geometry

        def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
            patched = z.expand(len(paths), -1, -1, -1).clone()
            for number, (path, copy) in enumerate(zip(paths, copies, strict=True)):
                run = slice(number, number + 1) if len(z) > 1 else slice(None)
                for head in (head for receiver_layer, head in path.receivers if receiver_layer == layer):
                    group = geometry.kv_group(layer, head)
                    heads = slice(head, head + 1), slice(group, group + 1)
                    one_head, new = call.for_heads(*heads).for_sequences(run), changed.for_heads(*heads)
                    inputs = {name: getattr(one_head, name) for name in RECEIVER_INPUTS}
                    name = cast(ReceiverInput, path.end)
                    follows = self._is_in(path.receiver_span).to(z.device)[:, None]
                    inputs[name] = torch.where(follows, getattr(new, name)[copy : copy + 1], inputs[name])
                    patched[number, heads[0]] = one_head.attend(**inputs)[0]
            return patched

        return edit

    def _patch_logits(self, paths: Sequence[Path]) -> Iterator[tuple[Path, float]]:
        """Patch paths to the logits."""
        last = len(self.run.layers)
        streams = self._changed_streams([path.origin for path in paths], [last])[last]
        with self._freezing(self.model_paths.final_norm, self._last_stream()):
            all_logits = self.run.target_logits_after(streams)
        for path, logits in zip(paths, all_logits, strict=True):
            yield path, self.replay.value(logits)

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

        def frozen_outputs(layer: int) -> backend.OutputEdit:
            def edit(z: Tensor, call: backend.AttentionCall) -> Tensor:
                outputs = self._outputs.load(layer).to(z).expand_as(z).clone()
                for number, ((sender_layer, head), span) in enumerate(origins):
                    if sender_layer == layer:
                        outputs[number, head] += self._limited(self._changes.load(layer)[head], span).to(z)
                return outputs

            return edit

        edits = {layer: frozen_outputs(layer) for layer in range(first, len(self.model_paths.branches))}
        return self.run.streams_before(decoder_layers, edits, len(origins))

    def _is_in(self, span: PathSpan) -> Tensor:
        """Which positions [L] of the run are in a span."""
        chosen = self._aligned[slice(*span)] if span else range(self.run.ids.shape[1])
        positions = torch.arange(self.run.ids.shape[1])
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


def _constant(outputs: Tensor) -> backend.OutputEdit:
    """An edit that replaces all head outputs."""
    return lambda z, call: outputs
