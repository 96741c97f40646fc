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
from headscope.forward.capture import Layers, capturing
from headscope.forward.input_checks import refuse_not_finite, refuse_unknown
from headscope.forward.logits import chunks, forwarding, predicted, token_losses
from headscope.models.checkpoint import Opened, evaluating
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed

Objective = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, vocabulary] float32, tokens that they predict [n]) -> a sum over these positions."""

LOGIT_CHUNK = 128
"""Positions whose logits are held at once: memory O(LOGIT_CHUNK x vocabulary)."""


class Streams:
    """Residual streams [1, L, D] by layer: the first `memory` bytes of them in memory, the others on disk."""

    def __init__(self, memory: float):
        self.memory, self.held = memory, 0
        self._kept: list[Tensor | tuple[Path, torch.device]] = []
        self._disk: tempfile.TemporaryDirectory[str] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, stream: Tensor) -> None:
        size = stream.numel() * stream.element_size()
        if self.held + size <= self.memory:
            self.held += size
            self._kept.append(stream)
            return
        if self._disk is None:
            self._disk = tempfile.TemporaryDirectory(prefix="headscope-", ignore_cleanup_errors=True)
        file = Path(self._disk.name) / f"{len(self._kept)}.pt"
        torch.save(stream.cpu(), file)
        self._kept.append((file, stream.device))

    def at(self, layer: int) -> Tensor:
        kept = self._kept[layer]
        if isinstance(kept, Tensor):
            return kept
        file, device = kept
        stream: Tensor = torch.load(file, weights_only=True).to(device)
        return stream


class Replay:
    """One document, ids [1, L], under one schedule, of which the tokens from `first` on are predicted.

    `rehearse` it once; use it inside `ready`.
    """

    def __init__(self, model: Model, schedule: Fixed | AdaRoPE, ids: Tensor, memory: float, first: int = 1):
        self.model, self.schedule, self.ids, self.first = model, schedule, ids, first
        self.layers = attention_layers(model)
        self.streams = Streams(memory)
        self._calls: list[tuple[Any, Any]] = []
        self._bare = True  # whether a layer returns its stream as such, not in a tuple

    @contextmanager
    def ready(self) -> Iterator[Layers]:
        """The model under the schedule, listening, without gradients of its own."""
        with attached(self.model, self.schedule), capturing(self.model) as layers, evaluating(self.model):
            yield layers

    def rehearse(self) -> None:
        """The one full pass: keeps what each layer is given and what the last returns."""

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.streams.append(args[0])
            self._calls.append((args[1:], kwargs))

        def last(module: nn.Module, args: Any, output: Any) -> None:
            self._bare = isinstance(output, Tensor)
            self.streams.append(stream_of(output))

        with ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
            stack.callback(self.layers[-1].register_forward_hook(last).remove)
            refuse_unknown(self.model, self.ids)
            hidden = backbone(self.model)(self.ids, use_cache=False).last_hidden_state
        refuse_not_finite(self.model, self.ids, hidden)

    def stream(self, layer: int) -> Tensor:
        """The residual stream [1, L, D] that the layer was given; one past the last layer, what that returned."""
        return self.streams.at(layer)

    def through(self, layer: int, stream: Tensor) -> Tensor:
        """What one layer makes of a residual stream."""
        args, kwargs = self._calls[layer]
        return stream_of(self.layers[layer](stream, *args, **kwargs))

    @property
    def predictions(self) -> int:
        """How many tokens are predicted."""
        return self.ids.shape[1] - self.first

    def losses(self, changes: Mapping[int, backend.Change]) -> Tensor:
        """Loss of each predicted token, nats, [L - first] float32, with head outputs changed in some layers.

        Runs from the lowest of these layers on; without changes, only what follows the layers.
        """
        return torch.cat([token_losses(logits, tokens) for logits, tokens in self._predicted(changes)])

    def hits(self) -> float:
        """Share of the predicted tokens that the model, with nothing changed, finds likeliest."""
        found = [(logits.argmax(-1) == tokens).sum() for logits, tokens in self._predicted({})]
        return float(sum(found)) / self.predictions

    def _predicted(self, changes: Mapping[int, backend.Change]) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [n, vocabulary], float32, and the tokens [n] that they predict."""
        lowest = min(changes, default=len(self.layers))
        stream = self.stream(lowest)
        with ExitStack() as stack:
            for layer, change in changes.items():
                stack.enter_context(backend.changing(self.model.attention[layer], change))
            for layer in range(lowest, len(self.layers)):
                stream = self.through(layer, stream)
        hidden = self._finish(stream)
        for at in self._chunks():
            logits, tokens = predicted(self.model, self.ids, hidden[:, at], at)
            yield logits.float(), tokens

    def _chunks(self) -> Iterator[slice]:
        """The positions that predict, some at a time."""
        return chunks(self.ids, LOGIT_CHUNK, self.first - 1)

    def backwards(
        self, objectives: Sequence[Objective], hear: Callable[[int, Tensor, backend.Call, list[Tensor]], None]
    ) -> None:
        """Gradients of some objectives with respect to the head outputs z of every layer, the last layer first.

        `hear(layer, z, call, gradients)` gets the layer's z [1, H, L, d], the call that computed it, and one gradient
        of that shape for each objective. One layer's activations are held at a time.
        """
        with torch.enable_grad():
            stream = self.stream(len(self.layers)).detach().requires_grad_()
            hidden = self._finish(stream)
            pulls = _gradients([hidden] * len(objectives), [stream], self._pulls(hidden.detach(), objectives))
            for layer in reversed(range(len(self.layers))):
                stream = self.stream(layer).detach().requires_grad_()
                with _overheard(self.model.attention[layer]) as heard:
                    output = self.through(layer, stream)
                ((z, call),) = heard
                both = _gradients([output] * len(objectives), [stream, z], [pull[0] for pull in pulls])
                q, k, v = (t.detach() for t in (call.q, call.k, call.v))
                with torch.no_grad():
                    hear(layer, z.detach(), replace(call, q=q, k=k, v=v), [gradient for _, gradient in both])
                pulls = [(gradient,) for gradient, _ in both]

    def _pulls(self, hidden: Tensor, objectives: Sequence[Objective]) -> list[Tensor]:
        """Gradients of the objectives with respect to the backbone's last hidden states."""
        pulls = [torch.zeros_like(hidden) for _ in objectives]
        for at in self._chunks():
            chunk = hidden[:, at].clone().requires_grad_()
            logits, tokens = predicted(self.model, self.ids, chunk, at)
            logits = logits.float()
            values = [objective(logits, tokens) for objective in objectives]
            for pull, (gradient,) in zip(pulls, _gradients(values, [chunk], [None] * len(values)), strict=True):
                pull[:, at] = gradient
        return pulls

    def _finish(self, stream: Tensor) -> Tensor:
        """The backbone's last hidden states [1, L, D] from what its last layer returned."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(forwarding(layer, lambda *_, **__: stream if self._bare else (stream,)))
            hidden: Tensor = backbone(self.model)(self.ids, use_cache=False).last_hidden_state
        return hidden


def attention_layers(model: Opened) -> list[nn.Module]:
    """The decoder layers of a model all of which attend by keys of their own. Raises UnsupportedModel for others."""
    layers = decoder_layers(model)
    if len(layers) != len(model.attention):
        raise UnsupportedModel(f"cannot resume {model.name} from a layer: its decoder layers are not one list")
    if lends_keys(model):
        raise UnsupportedModel(
            f"cannot resume {model.name} from a layer: its last layers attend by keys of earlier ones"
        )
    return layers


def lends_keys(model: Opened) -> bool:
    """Whether layers of the model attend by the keys and values that another layer made."""
    return bool(getattr(model.module.config.get_text_config(), "num_kv_shared_layers", 0))


@contextmanager
def _overheard(attention: nn.Module) -> Iterator[list[tuple[Tensor, backend.Call]]]:
    """Collects z and its call from every call of an attention module."""
    heard: list[tuple[Tensor, backend.Call]] = []

    def hear(z: Tensor, call: backend.Call) -> Tensor:
        heard.append((z, call))
        return z

    with backend.changing(attention, hear):
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


def stream_of(output: Any) -> Tensor:
    """The residual stream in what a decoder layer returned."""
    stream: Tensor = output if isinstance(output, Tensor) else output[0]
    return stream
