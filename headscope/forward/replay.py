"""Run a document once, store the input of every decoder layer, and resume the forward pass from any layer.

Works for families whose decoder layers take the residual stream as first argument; hybrid models have decoder layers
without attention among them. A resumed pass is a pass of the model's own code over as many copies of the document as
it has edits, in which the layers before the resumed one return what they returned in the recorded pass: their residual
stream, and the other state that they pass to later layers. When a model is first replayed, a resumed pass is compared
with full ones (`replay_check`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.forward.backbone import backbone, check_input_ids, refuse_non_finite
from headscope.forward.capture import CapturedLayers, answer_tokens, capturing
from headscope.forward.carried_state import (
    CarriedGradients,
    CarriedState,
    batch_axis,
    expand_batch,
)
from headscope.forward.layer_parts import collecting_parts, residual_stream
from headscope.forward.logits import (
    logits_and_targets,
    predicting_position_slices,
    refuse_non_finite_losses,
    replacing_forward,
    token_losses,
)
from headscope.forward.replay_check import check_once
from headscope.forward.single_layers import attention_layer_indices, single_layer_list
from headscope.forward.stream_store import ResidualStreamStore
from headscope.models import quantization
from headscope.models.checkpoint import evaluating
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule

Objective = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, vocabulary] float32, target tokens [n]) -> a sum over these positions."""

POSITIONS_PER_CHUNK = 128
"""Positions whose logits are in memory at once."""


class Replay:
    """One document, ids [1, L], under one schedule. The targets are the tokens from `first_target` on, or `targets`.

    Objectives are sums over the target tokens and get chunks of them; with `targets` they get all logits at once.

    Call `record_streams` once, and use the replay inside `capturing`. Streams are counted by decoder layer, edits and
    gradients by attention layer.
    """

    def __init__(
        self,
        model: Model,
        schedule: FixedSchedule | AdaRoPE,
        ids: Tensor,
        memory_bytes: float,
        first_target: int = 1,
        targets: Tensor | None = None,
    ):
        self.model, self.schedule, self.ids, self.first_target = model, schedule, ids, first_target
        self._chunk_length = POSITIONS_PER_CHUNK if targets is None else len(targets)
        self._target_ids = ids if targets is None else torch.cat([ids[:, :first_target], targets[None]], 1)
        self.layers = single_layer_list(model)
        self._attention_layers = attention_layer_indices(model, self.layers)
        self.streams = ResidualStreamStore(memory_bytes)
        self._carried = CarriedState()
        self._batch_axis = 0

    @contextmanager
    def capturing(self) -> Iterator[CapturedLayers]:
        """Attach the schedule, capture the layers and put the model into evaluation mode."""
        token = answer_tokens.set(self.target_count if self.first_target > 1 else 0)
        try:
            with attached(self.model, self.schedule), capturing(self.model) as layers, evaluating(self.model):
                yield layers
        finally:
            answer_tokens.reset(token)

    def record_streams(self) -> Tensor:
        """Run the full pass and store the input of every layer and the output of the last.

        Returns the backbone's last hidden states [1, L, D]. Raises UnsupportedModel if resumed passes of this model
        differ from full ones.
        """
        check_once(self.model, lambda ids: Replay(self.model, self.schedule, ids, memory_bytes=1e9))

        def record_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._batch_axis = batch_axis(args[0]) or 0
            self.streams.append(args[0])
            self._carried.record_arguments(args[1:], kwargs)

        def record_output(module: nn.Module, args: Any, output: Any) -> None:
            self._carried.record_outputs(output)
            if module is self.layers[-1]:
                self.streams.append(residual_stream(output))

        with ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(record_input, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(record_output).remove)
            check_input_ids(self.model, self.ids)
            hidden: Tensor = backbone(self.model)(self.ids, use_cache=False).last_hidden_state
        refuse_non_finite(self.model, self.ids, hidden)
        return hidden

    def residual_stream_before(self, layer: int) -> Tensor:
        """The residual stream [1, L, D] before a decoder layer; for the index after the last layer, its output."""
        return self.streams.load(layer)

    def decoder_layer_of(self, attention_layer: int) -> int:
        """The decoder layer with this attention layer."""
        return self._attention_layers.index(attention_layer)

    def run_layer(self, layer: int, stream: Tensor) -> Tensor:
        """The output [1, L, D] of one decoder layer for a residual stream and the other recorded arguments."""
        args, kwargs = self._carried.arguments(layer, self._carried.tensors)
        return residual_stream(self.layers[layer](stream, *args, **kwargs))

    def attention(self, layer: int, streams: Tensor | None = None) -> tuple[Tensor, backend.AttentionCall]:
        """The head outputs z [1, H, L, d] of an attention layer and the call that computed them.

        `streams` [B, L, D] replace the recorded residual stream before the layer. The rest of the layer is not
        computed.
        """

        def stop(z: Tensor, call: backend.AttentionCall) -> Tensor:
            raise _AttentionFinished(z, call)

        decoder_layer = self.decoder_layer_of(layer)
        with backend.editing_output(self.model.attention_modules[layer], stop):
            try:
                self._resume(decoder_layer, self.residual_stream_before(decoder_layer) if streams is None else streams)
            except _AttentionFinished as finished:
                return finished.z, finished.call
        raise AssertionError(f"layer {layer} did not call its attention")

    @property
    def target_count(self) -> int:
        """Number of target tokens."""
        return self.ids.shape[1] - self.first_target

    def losses(self, output_edits: Mapping[int, backend.OutputEdit]) -> Tensor:
        """Loss of each target token in nats, [L - first_target] float32, with edited head outputs in some attention
        layers.

        Resumes at the lowest edited layer; without edits, after the last layer.
        """
        losses = torch.cat([token_losses(logits, tokens) for logits, tokens in self._logits_and_targets(output_edits)])
        refuse_non_finite_losses(self.model, losses.cpu())
        return losses

    def losses_of(self, layer: int, outputs: Tensor) -> Tensor:
        """The same losses [B, L - first_target] for each of B head outputs [B, H, L, d] of an attention layer.

        The B runs are one batch, resumed at this layer.
        """
        return self.losses_of_edits({layer: lambda z, call: outputs}, len(outputs))

    def losses_of_edits(self, output_edits: Mapping[int, backend.OutputEdit], copies: int) -> Tensor:
        """The same losses [copies, L - first_target] of one batch of runs, with edited head outputs."""
        hidden = self.hidden_states(output_edits, copies)
        rows = []
        for number in range(len(hidden)):
            parts = (
                logits_and_targets(self.model, self._target_ids, hidden[number : number + 1, positions], positions)
                for positions in self._predicting_position_slices()
            )
            rows.append(torch.cat([token_losses(logits.float(), tokens) for logits, tokens in parts]))
        losses = torch.stack(rows)
        refuse_non_finite_losses(self.model, losses.cpu())
        return losses

    def target_logits(self, output_edits: Mapping[int, backend.OutputEdit]) -> Tensor:
        """Logits [L - first_target, vocabulary], float32, that predict the target tokens, with the same edits."""
        return torch.cat([logits for logits, _ in self._logits_and_targets(output_edits)])

    def target_logits_of(self, layer: int, outputs: Tensor) -> Tensor:
        """The same logits [B, L - first_target, vocabulary] for each of B head outputs [B, H, L, d] of an attention
        layer.

        The B runs are one batch, resumed at this layer.
        """
        return self._batch_logits(self.hidden_states({layer: lambda z, call: outputs}, len(outputs)))

    def target_logits_of_edits(self, output_edits: Mapping[int, backend.OutputEdit], copies: int) -> Tensor:
        """The same logits [copies, L - first_target, vocabulary] of one batch of runs, with edited head outputs."""
        return self._batch_logits(self.hidden_states(output_edits, copies))

    def target_logits_after(self, streams: Tensor) -> Tensor:
        """The same logits [B, L - first_target, vocabulary] for each of B outputs [B, L, D] of the last layer."""
        return self.target_logits_from(len(self.layers), streams)

    def target_logits_from(self, layer: int, streams: Tensor) -> Tensor:
        """The same logits [B, L - first_target, vocabulary] for each of B residual streams [B, L, D] before a decoder
        layer."""
        return self._batch_logits(self._resume(layer, streams))

    def _batch_logits(self, hidden: Tensor) -> Tensor:
        """The logits [B, L - first_target, vocabulary] of last hidden states [B, L, D]."""
        chunks = [
            logits_and_targets(self.model, self.ids, hidden[number : number + 1, positions], positions)[0].float()
            for number in range(len(hidden))
            for positions in self._predicting_position_slices()
        ]
        return torch.cat(chunks).view(len(hidden), self.target_count, -1)

    def accuracy(self) -> float:
        """Share of the target tokens that are the unchanged model's top prediction."""
        correct = [(logits.argmax(-1) == tokens).sum() for logits, tokens in self._logits_and_targets({})]
        return float(sum(correct)) / self.target_count

    def _logits_and_targets(self, output_edits: Mapping[int, backend.OutputEdit]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [n, vocabulary], float32, and their target tokens [n], in chunks."""
        hidden = self.hidden_states(output_edits)
        for positions in self._predicting_position_slices():
            logits, tokens = logits_and_targets(self.model, self._target_ids, hidden[:, positions], positions)
            yield logits.float(), tokens

    def hidden_states(self, output_edits: Mapping[int, backend.OutputEdit], copies: int = 1) -> Tensor:
        """The backbone's last hidden states [copies, L, D] with edited head outputs in some attention layers.

        Resumes at the lowest edited layer; without edits, after the last layer. An edit receives and returns head
        outputs [copies, H, L, d].
        """
        lowest = self.decoder_layer_of(min(output_edits)) if output_edits else len(self.layers)
        with ExitStack() as stack:
            for layer, edit in output_edits.items():
                stack.enter_context(backend.editing_output(self.model.attention_modules[layer], edit))
            return self._resume(lowest, expand_batch(self.residual_stream_before(lowest), copies))

    def streams_before(
        self, decoder_layers: Sequence[int], output_edits: Mapping[int, backend.OutputEdit], copies: int
    ) -> dict[int, Tensor]:
        """The residual streams [copies, L, D] before decoder layers with edited head outputs in some attention layers.

        The edits are those of `hidden_states`. For the index after the last layer, its output. The layers must come
        after the one of the lowest edit.
        """
        streams: dict[int, Tensor] = {}

        def record_input(number: int) -> Callable[[nn.Module, Any], None]:
            return lambda module, args: streams.__setitem__(number, args[0])

        def record_output(module: nn.Module, args: Any, output: Any) -> None:
            streams[len(self.layers)] = residual_stream(output)

        with ExitStack() as stack:
            for number in decoder_layers:
                if number == len(self.layers):
                    stack.callback(self.layers[-1].register_forward_hook(record_output).remove)
                else:
                    stack.callback(self.layers[number].register_forward_pre_hook(record_input(number)).remove)
            self.hidden_states(output_edits, copies)
        return streams

    def final_hidden_states(self, stream: Tensor) -> Tensor:
        """The backbone's last hidden states [B, L, D] from the output of its last layer."""
        return self._resume(len(self.layers), stream)

    def _resume(self, layer: int, streams: Tensor) -> Tensor:
        """The backbone's last hidden states [B, L, D] of passes with these residual streams before a decoder layer."""
        copies = streams.shape[self._batch_axis]

        def outputs_of(number: int) -> Callable[..., Any]:
            return lambda *_, **kwargs: self._carried.outputs(number, streams, copies, kwargs)

        def replace_input(module: nn.Module, args: Any) -> Any:
            return (streams, *args[1:])

        with ExitStack() as stack:
            for number, module in enumerate(self.layers[:layer]):
                stack.enter_context(replacing_forward(module, outputs_of(number)))
            for module in self.layers[layer : layer + 1]:
                stack.callback(module.register_forward_pre_hook(replace_input).remove)
            ids = self.ids.expand(copies, -1)
            hidden: Tensor = backbone(self.model)(ids, use_cache=False).last_hidden_state
        return hidden

    def _predicting_position_slices(self) -> Iterator[slice]:
        """The predicting positions, in chunks."""
        return predicting_position_slices(self.ids, self._chunk_length, self.first_target - 1)

    def backpropagate(
        self,
        objectives: Sequence[Objective],
        on_layer: Callable[[int, Tensor, backend.AttentionCall, list[Tensor]], None],
    ) -> None:
        """Compute gradients of objectives with respect to the head outputs z of every attention layer, last first.

        `on_layer(layer, z, call, gradients)` receives z [1, H, L, d], the call that computed it, and one gradient of
        the same shape per objective. Only one layer's activations are in memory at a time. Raises UnsupportedModel for
        weights that a forward pass has packed in 4 bits.
        """

        def collecting(layer: int) -> AbstractContextManager[list[tuple[Tensor, backend.AttentionCall]]]:
            number = self._attention_layers[layer]
            return backend.collecting_outputs(() if number is None else (self.model.attention_modules[number],))

        def on_outputs(layer: int, z: Tensor, call: backend.AttentionCall, gradients: list[Tensor]) -> None:
            number = self._attention_layers[layer]
            assert number is not None
            q, k, v = (t.detach() for t in (call.q, call.k, call.v))
            on_layer(number, z, replace(call, q=q, k=k, v=v), gradients)

        self._pull_back(objectives, collecting, lambda layer, gradients: None, on_outputs)

    def backpropagate_streams(
        self,
        objectives: Sequence[Objective],
        parts: Sequence[Mapping[str, nn.Module]],
        on_stream: Callable[[int, list[Tensor]], None],
        on_part: Callable[[int, Tensor, str, list[Tensor]], None],
    ) -> None:
        """Compute gradients of objectives with respect to the residual stream before every decoder layer, last first.

        `on_stream(layer, gradients)` receives one gradient of the shape of the stream per objective, and
        `on_part(layer, output, name, gradients)` those of the output of each module in `parts[layer]`. Memory and
        errors are those of `backpropagate`.
        """
        self._pull_back(objectives, lambda layer: collecting_parts(parts[layer]), on_stream, on_part)

    def _pull_back(
        self,
        objectives: Sequence[Objective],
        collecting: Callable[[int], AbstractContextManager[list[tuple[Tensor, Any]]]],
        on_stream: Callable[[int, list[Tensor]], None],
        on_collected: Callable[[int, Tensor, Any, list[Tensor]], None],
    ) -> None:
        """Run every decoder layer again, last first, and pull the gradients of objectives back through it.

        `collecting(layer)` lists intermediate tensors of the layer, each with what `on_collected` should know of it.
        """
        quantization.refuse_gradients(self.model.module, self.model.name)
        with torch.enable_grad():
            stream = self.residual_stream_before(len(self.layers)).detach().requires_grad_()
            hidden = self.final_hidden_states(stream)
            seeds = [
                gradient
                for (gradient,) in _gradients(
                    [hidden] * len(objectives), [stream], self.hidden_gradients(hidden.detach(), objectives)
                )
            ]
            carried = CarriedGradients(self._carried, len(objectives))
            for layer in reversed(range(len(self.layers))):
                stream = self.residual_stream_before(layer).detach().requires_grad_()
                args, kwargs = self._carried.arguments(layer, carried.leaves)
                with collecting(layer) as collected:
                    output = self.layers[layer](stream, *args, **kwargs)
                written = self._carried.written(layer, output, kwargs)
                inputs = [stream, *(tensor for tensor, _ in collected)]
                gradients = carried.pull_back(residual_stream(output), written, inputs, seeds)
                seeds = [by_input[0] for by_input in gradients]
                with torch.no_grad():
                    on_stream(layer, seeds)
                    for number, (tensor, note) in enumerate(collected, start=1):
                        on_collected(layer, tensor.detach(), note, [by_input[number] for by_input in gradients])

    def hidden_gradients(self, hidden: Tensor, objectives: Sequence[Objective]) -> list[Tensor]:
        """Gradients of the objectives with respect to the backbone's last hidden states."""
        totals = [torch.zeros_like(hidden) for _ in objectives]
        for positions in self._predicting_position_slices():
            chunk = hidden[:, positions].clone().requires_grad_()
            logits, tokens = logits_and_targets(self.model, self._target_ids, chunk, positions)
            logits = logits.float()
            values = [objective(logits, tokens) for objective in objectives]
            for total, (gradient,) in zip(totals, _gradients(values, [chunk], [None] * len(values)), strict=True):
                total[:, positions] = gradient
        return totals


class _AttentionFinished(Exception):
    """Stops a layer after its attention; carries the head outputs and their call."""

    def __init__(self, z: Tensor, call: backend.AttentionCall):
        self.z, self.call = z, call


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor | None]
) -> list[tuple[Tensor, ...]]:
    """One tuple of gradients, by input, for each output; all may share one graph."""
    last = len(outputs) - 1
    return [
        torch.autograd.grad(output, inputs, seed, retain_graph=number < last)
        for number, (output, seed) in enumerate(zip(outputs, seeds, strict=True))
    ]
