"""Run a document once, keep what every decoder layer was given, and go on from any layer as often as is wanted.

Knows any family whose decoder layers take the residual stream first: a resumed pass calls the model's own layers
with the arguments that the model itself called them with, and the model's own code for all that follows them.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.errors import UnsupportedModel
from headscope.forward.backbone import backbone, decoder_layers
from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.input_checks import refuse_non_finite, refuse_unknown_tokens
from headscope.forward.logits import logits_and_targets, predicting_position_slices, replacing_forward, token_losses
from headscope.models.checkpoint import LoadedModel, evaluating
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed

Objective = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, vocabulary] float32, tokens that they predict [n]) -> a sum over these positions."""

POSITIONS_PER_CHUNK = 128
"""Positions whose logits are held at once: memory O(LOGIT_CHUNK x vocabulary)."""


class StreamStore:
    """Residual streams [1, L, D] by layer: the first `memory` bytes of them in memory, the others on disk."""

    def __init__(self, memory_bytes: float):
        self.memory_bytes, self.bytes_in_memory = memory_bytes, 0
        self._entries: list[Tensor | tuple[Path, torch.device]] = []
        self._temporary_directory: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, stream: Tensor) -> None:
        size = stream.numel() * stream.element_size()
        if self.bytes_in_memory + size <= self.memory_bytes:
            self.bytes_in_memory += size
            self._entries.append(stream)
            return
        if self._temporary_directory is None:
            self._temporary_directory = tempfile.TemporaryDirectory(prefix="headscope-", ignore_cleanup_errors=True)
        file = Path(self._temporary_directory.name) / f"{len(self._entries)}.pt"
        torch.save(stream.cpu(), file)
        self._entries.append((file, stream.device))

    def load(self, layer: int) -> Tensor:
        kept = self._entries[layer]
        if isinstance(kept, Tensor):
            return kept
        file, device = kept
        stream: Tensor = torch.load(file, weights_only=True).to(device)
        return stream


class Replay:
    """One document, ids [1, L], under one schedule, of which the tokens from `first` on are predicted.

    `rehearse` it once; use it inside `ready`.
    """

    def __init__(
        self, model: Model, schedule: Fixed | AdaRoPE, ids: Tensor, memory_bytes: float, first_target: int = 1
    ):
        self.model, self.schedule, self.ids, self.first_target = model, schedule, ids, first_target
        self.layers = resumable_layers(model)
        self.streams = StreamStore(memory_bytes)
        self._layer_arguments: list[tuple[Any, Any]] = []
        self._returns_tensor = True  # whether a layer returns its stream as such, not in a tuple

    @contextmanager
    def running(self) -> Iterator[CapturedLayers]:
        """The model under the schedule, listening, without gradients of its own."""
        with attached(self.model, self.schedule), capturing(self.model) as layers, evaluating(self.model):
            yield layers

    def record_streams(self) -> None:
        """The one full pass: keeps what each layer is given and what the last returns."""

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.streams.append(args[0])
            self._layer_arguments.append((args[1:], kwargs))

        def last(module: nn.Module, args: Any, output: Any) -> None:
            self._returns_tensor = isinstance(output, Tensor)
            self.streams.append(residual_stream(output))

        with ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
            stack.callback(self.layers[-1].register_forward_hook(last).remove)
            refuse_unknown_tokens(self.model, self.ids)
            hidden = backbone(self.model)(self.ids, use_cache=False).last_hidden_state
        refuse_non_finite(self.model, self.ids, hidden)

    def stream(self, layer: int) -> Tensor:
        """The residual stream [1, L, D] that the layer was given; one past the last layer, what that returned."""
        return self.streams.load(layer)

    def run_layer(self, layer: int, stream: Tensor) -> Tensor:
        """What one layer makes of a residual stream."""
        args, kwargs = self._layer_arguments[layer]
        return residual_stream(self.layers[layer](stream, *args, **kwargs))

    @property
    def target_count(self) -> int:
        """How many tokens are predicted."""
        return self.ids.shape[1] - self.first_target

    def losses(self, output_edits: Mapping[int, backend.OutputEdit]) -> Tensor:
        """Loss of each predicted token, nats, [L - first] float32, with head outputs changed in some layers.

        Runs from the lowest of these layers on; without changes, only what follows the layers.
        """
        return torch.cat([token_losses(logits, tokens) for logits, tokens in self._logits_and_targets(output_edits)])

    def accuracy(self) -> float:
        """Share of the predicted tokens that the model, with nothing changed, finds likeliest."""
        found = [(logits.argmax(-1) == tokens).sum() for logits, tokens in self._logits_and_targets({})]
        return float(sum(found)) / self.target_count

    def _logits_and_targets(self, output_edits: Mapping[int, backend.OutputEdit]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [n, vocabulary], float32, and the tokens [n] that they predict."""
        lowest = min(output_edits, default=len(self.layers))
        stream = self.stream(lowest)
        with ExitStack() as stack:
            for layer, change in output_edits.items():
                stack.enter_context(backend.editing_output(self.model.attention_modules[layer], change))
            for layer in range(lowest, len(self.layers)):
                stream = self.run_layer(layer, stream)
        hidden = self._final_hidden_states(stream)
        for at in self._predicting_position_slices():
            logits, tokens = logits_and_targets(self.model, self.ids, hidden[:, at], at)
            yield logits.float(), tokens

    def _predicting_position_slices(self) -> Iterator[slice]:
        """The positions that predict, some at a time."""
        return predicting_position_slices(self.ids, POSITIONS_PER_CHUNK, self.first_target - 1)

    def backpropagate(
        self,
        objectives: Sequence[Objective],
        on_layer: Callable[[int, Tensor, backend.AttentionCall, list[Tensor]], None],
    ) -> None:
        """Gradients of some objectives with respect to the head outputs z of every layer, the last layer first.

        `hear(layer, z, call, gradients)` gets the layer's z [1, H, L, d], the call that computed it, and one gradient
        of that shape for each objective. One layer's activations are held at a time.
        """
        with torch.enable_grad():
            stream = self.stream(len(self.layers)).detach().requires_grad_()
            hidden = self._final_hidden_states(stream)
            pulls = _gradients(
                [hidden] * len(objectives), [stream], self._hidden_gradients(hidden.detach(), objectives)
            )
            for layer in reversed(range(len(self.layers))):
                stream = self.stream(layer).detach().requires_grad_()
                with _collecting_outputs(self.model.attention_modules[layer]) as heard:
                    output = self.run_layer(layer, stream)
                ((z, call),) = heard
                both = _gradients([output] * len(objectives), [stream, z], [pull[0] for pull in pulls])
                q, k, v = (t.detach() for t in (call.q, call.k, call.v))
                with torch.no_grad():
                    on_layer(layer, z.detach(), replace(call, q=q, k=k, v=v), [gradient for _, gradient in both])
                pulls = [(gradient,) for gradient, _ in both]

    def _hidden_gradients(self, hidden: Tensor, objectives: Sequence[Objective]) -> list[Tensor]:
        """Gradients of the objectives with respect to the backbone's last hidden states."""
        pulls = [torch.zeros_like(hidden) for _ in objectives]
        for at in self._predicting_position_slices():
            chunk = hidden[:, at].clone().requires_grad_()
            logits, tokens = logits_and_targets(self.model, self.ids, chunk, at)
            logits = logits.float()
            values = [objective(logits, tokens) for objective in objectives]
            for pull, (gradient,) in zip(pulls, _gradients(values, [chunk], [None] * len(values)), strict=True):
                pull[:, at] = gradient
        return pulls

    def _final_hidden_states(self, stream: Tensor) -> Tensor:
        """The backbone's last hidden states [1, L, D] from what its last layer returned."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(
                    replacing_forward(layer, lambda *_, **__: stream if self._returns_tensor else (stream,))
                )
            hidden: Tensor = backbone(self.model)(self.ids, use_cache=False).last_hidden_state
        return hidden


def resumable_layers(model: LoadedModel) -> list[nn.Module]:
    """The decoder layers of a model all of which attend by keys of their own. Raises UnsupportedModel for others."""
    layers = decoder_layers(model)
    if len(layers) != len(model.attention_modules):
        raise UnsupportedModel(f"cannot resume {model.name} from a layer: its decoder layers are not one list")
    if shares_keys_across_layers(model):
        raise UnsupportedModel(
            f"cannot resume {model.name} from a layer: its last layers attend by keys of earlier ones"
        )
    return layers


def shares_keys_across_layers(model: LoadedModel) -> bool:
    """Whether layers of the model attend by the keys and values that another layer made."""
    return bool(getattr(model.module.config.get_text_config(), "num_kv_shared_layers", 0))


@contextmanager
def _collecting_outputs(attention: nn.Module) -> Iterator[list[tuple[Tensor, backend.AttentionCall]]]:
    """Collects z and its call from every call of an attention module."""
    heard: list[tuple[Tensor, backend.AttentionCall]] = []

    def hear(z: Tensor, call: backend.AttentionCall) -> Tensor:
        heard.append((z, call))
        return z

    with backend.editing_output(attention, hear):
        yield heard


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor | None]
) -> list[tuple[Tensor, ...]]:
    """One tuple of gradients, by input, for each output; all may share one graph."""
    last = len(outputs) - 1
    return [
        torch.autograd.grad(output, inputs, seed, retain_graph=at < last)
        for at, (output, seed) in enumerate(zip(outputs, seeds, strict=True))
    ]


def residual_stream(output: Any) -> Tensor:
    """The residual stream in what a decoder layer returned."""
    stream: Tensor = output if isinstance(output, Tensor) else output[0]
    return stream
