"""Runs of one text with edits: the text is recorded once, and runs start at the first layer that they change.

Works for families whose decoder layers take the residual stream as first argument; hybrid models have decoder layers
without attention among them. Runs are one growing batch: a run joins at its first edited layer with the recorded
residual stream. Where layers pass further state to later ones, runs of one first layer are a batch of the model's own
code instead, in which the layers before return what they returned in the recorded pass. When a model is first replayed,
both are compared with full passes (`replay_check`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.attention.edited_attention import outputs_of_record
from headscope.attention.edits import LayerEdit, prompt_length
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.backbone import (
    attention_layer_indices,
    backbone,
    check_input_ids,
    refuse_non_finite,
    single_layer_list,
)
from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.carried_state import CarriedGradients, CarriedState, batch_axis, expand_batch
from headscope.forward.free_memory import in_batches, runs_per_batch
from headscope.forward.layer_parts import LayerParts, collecting_parts, residual_stream
from headscope.forward.logits import (
    batched_logits,
    logits_and_targets,
    predicting_position_slices,
    refuse_non_finite_losses,
    replacing_forward,
    token_losses,
)
from headscope.forward.prefix_cache import FrozenPrefix
from headscope.forward.stream_store import ResidualStreamStore
from headscope.interventions.edits import Edit, Run, registered
from headscope.interventions.kinds import Replace
from headscope.interventions.parts import PartName, editing_parts, layers_with
from headscope.interventions.replay_check import check_once, grows_batches
from headscope.models import quantization
from headscope.models.checkpoint import evaluating
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule

Objective = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, vocabulary] float32, target tokens [n]) -> a sum over these positions."""
T = TypeVar("T")
ActivationName = Literal["z", "q", "k", "v"]

POSITIONS_PER_CHUNK = 128
"""Positions whose logits are in memory at once."""


class Activations(Mapping[int, Tensor]):
    """One activation of a run by index of the layer, without the batch axis; most may be on disk."""

    def __init__(self, store: ResidualStreamStore):
        self._store = store

    def __getitem__(self, layer: int) -> Tensor:
        return self._store.load(layer)

    def __len__(self) -> int:
        return len(self._store)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class Replay:
    """One text, ids [1, L], under one schedule. The targets are the tokens from `first_target` on, or `targets`.

    Objectives are sums over the target tokens and get chunks of them; with `targets` they get all logits at once.
    `parts` are the modules whose outputs are attn_out and mlp_out, for edits of these. After `use_prefix` only the
    tokens after the prefix are computed, `start` is their first, and hidden states and residual streams are theirs.

    Call `record_streams` once, and use the replay inside `capturing`. Edits of contexts that are open then act in all
    runs. Streams are counted by decoder layer, edits and gradients by attention layer.
    """

    def __init__(
        self,
        model: Model,
        schedule: FixedSchedule | AdaRoPE,
        ids: Tensor,
        memory_bytes: float,
        first_target: int = 1,
        targets: Tensor | None = None,
        parts: LayerParts = (),
    ):
        self.model, self.schedule, self.ids, self.first_target = model, schedule, ids, first_target
        self.parts, self.start = parts, 0
        self.prefix: FrozenPrefix | None = None
        self._chunk_length = POSITIONS_PER_CHUNK if targets is None else len(targets)
        self._target_ids = ids if targets is None else torch.cat([ids[:, :first_target], targets[None]], 1)
        self.layers = single_layer_list(model)
        self._attention_layers = attention_layer_indices(model, self.layers)
        self._memory_bytes = memory_bytes
        self.streams = ResidualStreamStore(memory_bytes)
        self._carried = CarriedState()
        self._batch_axis = 0
        self._activations: dict[str, Activations] = {}
        self._records: dict[int, AttentionRecord] = {}
        self._part_values: dict[str, dict[int, Tensor]] = {}
        self._open_edits: list[Any] = []

    @contextmanager
    def capturing(self) -> Iterator[CapturedLayers]:
        """Attach the schedule, capture the layers and put the model into evaluation mode."""
        with (
            self._reading_text(),
            attached(self.model, self.schedule),
            capturing(self.model) as layers,
            evaluating(self.model),
        ):
            yield layers

    @contextmanager
    def _reading_text(self) -> Iterator[None]:
        """Let passes inside the `with` know the length of this text's prompt; another replay may be captured."""
        token = prompt_length.set(self.prompt_length)
        try:
            yield
        finally:
            prompt_length.reset(token)

    def use_prefix(self, prefix: FrozenPrefix) -> None:
        """Compute only the tokens after a prefix of the text, which has no targets. Call it before recording."""
        self.prefix, self.start = prefix, prefix.length

    def record_streams(self) -> Tensor:
        """Run the full pass and store the input of every layer and the output of the last.

        Returns the backbone's last hidden states [1, L - start, D]. Raises UnsupportedModel if runs of this model
        differ from full passes.
        """
        check_once(self.model, lambda ids: Replay(self.model, self.schedule, ids, memory_bytes=1e9))
        self._open_edits = backend.registered_edits(self.model.attention_modules)

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
            hidden = self._backbone(1)
        refuse_non_finite(self.model, self.ids, hidden)
        return hidden

    def _backbone(self, copies: int) -> Tensor:
        """The last hidden states of the backbone's own pass over copies of the text."""
        cache = (
            {"use_cache": False} if self.prefix is None else {"past_key_values": self.prefix.cache, "use_cache": True}
        )
        with self._reading_text():
            output = backbone(self.model)(self.ids[:, self.start :].expand(copies, -1), **cache)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def residual_stream_before(self, layer: int) -> Tensor:
        """The residual stream [1, L - start, D] before a decoder layer; for the index after the last, its output."""
        return self.streams.load(layer)

    def decoder_layer_of(self, attention_layer: int) -> int:
        """The decoder layer with this attention layer."""
        return self._attention_layers.index(attention_layer)

    def run_layer(self, layer: int, stream: Tensor) -> Tensor:
        """The output [1, L, D] of one decoder layer for a residual stream and the other recorded arguments."""
        args, kwargs = self._carried.arguments(layer, self._carried.tensors)
        with self._reading_text():
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

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt: those before the targets, or all of a text whose tokens are all targets."""
        return self.first_target if self.first_target > 1 else self.ids.shape[1]

    def first_layer(self, run: Run) -> int:
        """The decoder layer at which a run starts to differ; the number of layers without edits."""
        first = len(self.layers)
        for edit in run:
            layer = edit.layers[0]
            first = min(first, layer if edit.is_of_part else self.decoder_layer_of(layer))
        return first

    def activations(self, name: ActivationName) -> Activations:
        """z [H, n, dv], q [H, n, d], k [G, L, d] or v [G, L, dv] of the unchanged run, n = L - start, by layer."""
        if not self._activations:
            names = get_args(ActivationName)
            stores = {key: ResidualStreamStore(self._memory_bytes / len(names)) for key in names}
            with torch.no_grad():
                for layer in range(self.model.geometry.layers):
                    z, call = self.attention(layer)
                    for key, store in stores.items():
                        store.append(z[0] if key == "z" else getattr(call, key)[0])
            self._activations = {key: Activations(store) for key, store in stores.items()}
        return self._activations[name]

    def source(self, name: ActivationName, shift: int = 0, kind_name: str = "patched") -> Replace:
        """An activation of the unchanged run as a kind: token i of another run takes that of token i + shift."""
        own = shift - self.start if name in ("z", "q") else shift
        length = self.ids.shape[1] - (self.start if name in ("z", "q") else 0)
        return Replace(kind_name, self.activations(name), (name,), own, length)

    def records(self) -> Mapping[int, AttentionRecord]:
        """The attention records of the unchanged run, by index of the layer."""
        if not self._records:
            with torch.no_grad():
                for layer in range(self.model.geometry.layers):
                    z, call = self.attention(layer)
                    record = call.edited_layer.record(0, z[0])
                    self._records[layer] = replace(record, layer=layer, lse=outputs_of_record(record)[1])
        return self._records

    def part_values(self, part: PartName) -> Mapping[int, Tensor]:
        """A part of the unchanged run by decoder layer, [.., n, D], n = L - start."""
        if part not in self._part_values:
            values: dict[int, Tensor] = {}
            for layer in layers_with(part, len(self.layers), self.parts):
                values[layer] = self.residual_stream_before(layer)
                if part != "resid_pre":
                    with torch.no_grad(), collecting_parts({part: self.parts[layer][part]}) as collected:
                        self.run_layer(layer, values[layer])
                    ((values[layer], _),) = collected
            self._part_values[part] = values
        return self._part_values[part]

    def losses(self, runs: Sequence[Run]) -> Iterator[tuple[int, Tensor]]:
        """The number of every run, in ascending order of first layers, and its loss of each target token in nats.

        Losses are [L - first_target], float32.
        """
        for numbers, hidden in self._batches(runs):
            for number, of_run in zip(numbers, hidden, strict=True):
                parts = [token_losses(logits, tokens) for logits, tokens in self._logits_and_targets(of_run[None])]
                losses = torch.cat(parts)
                refuse_non_finite_losses(self.model, losses.cpu())
                yield number, losses

    def evaluate(
        self,
        runs: Sequence[Run],
        metric: Callable[[Tensor], float],
        on_progress: Callable[[int], None] | None = None,
    ) -> list[float]:
        """A metric of the logits [L - first_target, vocabulary] that predict the targets, of every run.

        `on_progress` gets the number of runs of every batch after it.
        """
        values = [0.0] * len(runs)
        for numbers, hidden in self._batches(runs):
            for number, logits in zip(numbers, self._logits(hidden), strict=True):
                values[number] = metric(logits)
            if on_progress is not None:
                on_progress(len(numbers))
        return values

    def target_logits(self, run: Run = ()) -> Tensor:
        """Logits [L - first_target, vocabulary], float32, that predict the target tokens in a run."""
        return next(self._logits(self.hidden_states([run])))

    def target_logits_after(self, streams: Tensor) -> Iterator[Tensor]:
        """The same logits for each of B outputs [B, L - start, D] of the last layer."""
        return self._logits(self.final_hidden_states(streams))

    def accuracy(self) -> float:
        """Share of the target tokens that are the unchanged model's top prediction."""
        hidden = self.hidden_states([()])
        correct = [(logits.argmax(-1) == tokens).sum() for logits, tokens in self._logits_and_targets(hidden)]
        return float(sum(correct)) / self.target_count

    def _logits_and_targets(self, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [n, vocabulary], float32, from last hidden states [1, L - start, D], and their targets, in chunks."""
        for positions in self._predicting_position_slices():
            chunk = hidden[:, positions.start - self.start : positions.stop - self.start]
            logits, tokens = logits_and_targets(self.model, self._target_ids, chunk, positions)
            yield logits.float(), tokens

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The logits [L - first_target, vocabulary], float32, of each of B last hidden states [B, L - start, D]."""
        first, last = self.first_target - 1, self.ids.shape[1] - 1
        if last - first > POSITIONS_PER_CHUNK:
            for of_run in hidden:
                yield torch.cat([logits for logits, _ in self._logits_and_targets(of_run[None])])
            return
        for batch in torch.split(hidden, max(1, POSITIONS_PER_CHUNK // (last - first))):
            rows = batch[:, first - self.start : last - self.start]
            yield from batched_logits(self.model, self.ids[:, first:last], rows).float()

    def _batches(self, runs: Sequence[Run]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The numbers of runs and their last hidden states [B, n, D], as many at once as fit the memory."""
        order = sorted(range(len(runs)), key=lambda number: self.first_layer(runs[number]))
        for batch in in_batches(order, runs_per_batch(self.model, self.ids.shape[1] - self.start)):
            yield batch, self.hidden_states([runs[number] for number in batch])

    def hidden_states(self, runs: Sequence[Run]) -> Tensor:
        """The backbone's last hidden states [B, L - start, D] of runs, in ascending order of their first layers.

        Raises BadInput if contexts with edits were opened or closed since the text was recorded.
        """
        if self._open_edits != backend.registered_edits(self.model.attention_modules):
            raise BadInput(
                "contexts that edit heads were opened or closed after the text was recorded. Record it inside them"
            )
        firsts = [self.first_layer(run) for run in runs]
        if self._carried.passes_streams_only and grows_batches(self.model):
            with registered(self.model, runs), editing_parts(self, runs):
                return self._run_growing_batch(firsts)
        groups = []
        for first in sorted({*firsts}):
            group = [run for run, own in zip(runs, firsts, strict=True) if own == first]
            with registered(self.model, group), editing_parts(self, group):
                groups.append(self._resume(first, expand_batch(self.residual_stream_before(first), len(group))))
        return torch.cat(groups)

    def streams_before(self, decoder_layers: Sequence[int], runs: Sequence[Run]) -> dict[int, Tensor]:
        """The residual streams [B, n, D] before decoder layers at which all runs have joined, in their order.

        For the index after the last layer, its output.
        """
        streams: dict[int, Tensor] = {}
        last = len(self.layers)

        def record_input(number: int) -> Callable[[nn.Module, Any], None]:
            return lambda module, args: streams.__setitem__(number, args[0])

        def record_output(module: nn.Module, args: Any, output: Any) -> None:
            streams[last] = residual_stream(output)

        with ExitStack() as stack:
            for number in decoder_layers:
                if number == last:
                    stack.callback(self.layers[-1].register_forward_hook(record_output).remove)
                else:
                    stack.callback(self.layers[number].register_forward_pre_hook(record_input(number)).remove)
            self.hidden_states(runs)
        return streams

    def _run_growing_batch(self, firsts: Sequence[int]) -> Tensor:
        """The last hidden states of runs with these first layers, ascending.

        The layers run inside the backbone's own pass over one copy of the text, which computes positions and applies
        the final norm: all layers but the last pass their input on, and the last one runs them all.
        """
        last, is_running = len(self.layers) - 1, False
        if firsts[0] > last:
            return self.final_hidden_states(expand_batch(self.residual_stream_before(last + 1), len(firsts)))

        def joined(stream: Tensor | None, number: int) -> Tensor:
            """The streams before a layer with those of the runs that start there."""
            joining = firsts.count(number)
            parts = [] if stream is None else [stream]
            if joining:
                parts.append(expand_batch(self.residual_stream_before(number), joining))
            return torch.cat(parts, self._batch_axis) if len(parts) > 1 else parts[0]

        def run_layers() -> Tensor:
            stream: Tensor | None = None
            for number in range(firsts[0], last + 1):
                stream = joined(stream, number)
                copies = stream.shape[self._batch_axis]
                args, kwargs = self._carried.arguments(number, self._carried.tensors)
                args = [expand_batch(value, copies) for value in args]
                kwargs = {name: expand_batch(value, copies) for name, value in kwargs.items()}
                stream = residual_stream(self.layers[number](stream, *args, **kwargs))
            return joined(stream, last + 1)

        def forward_of(number: int, own_forward: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                nonlocal is_running
                if is_running:
                    return own_forward(*args, **kwargs)
                if number < last:
                    return self._carried.outputs(number, args[0], 1, kwargs)
                is_running = True
                try:
                    stream = run_layers()
                finally:
                    is_running = False
                return self._carried.outputs(number, stream, stream.shape[self._batch_axis], kwargs)

            return forward

        with ExitStack() as stack:
            for number, module in enumerate(self.layers):
                stack.enter_context(replacing_forward(module, forward_of(number, module.forward)))
            return self._backbone(1)

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
                stack.callback(module.register_forward_pre_hook(replace_input, prepend=True).remove)
            return self._backbone(copies)

    def _predicting_position_slices(self) -> Iterator[slice]:
        """The predicting positions, in chunks."""
        return predicting_position_slices(self.ids, self._chunk_length, self.first_target - 1)

    def estimate(self, runs: Sequence[Run], objectives: Sequence[Objective], combine: Callable[[Tensor], T]) -> list[T]:
        """Estimated change by every run, from gradients: <gradient, edited activation - activation>.

        The edited head outputs are exact, softmax included; only what follows is linearised (AtP*, Kramar et al. 2024).
        `combine` gets the products [objectives, n] of a run, by token, summed over its heads or parts, float64. One
        backward pass for each objective; runs of disjoint heads and tokens share a pass of attention.
        """
        totals = torch.zeros(len(runs), len(objectives), self.ids.shape[1] - self.start, dtype=torch.float64)
        by_layer: dict[int, dict[int, list[LayerEdit]]] = defaultdict(lambda: defaultdict(list))
        for number, run in enumerate(runs):
            for edit in run:
                for layer in () if edit.is_of_part else edit.layers:
                    by_layer[layer][number] += edit.layer_edits(layer)
        if by_layer:
            self.backpropagate(objectives, partial(self._add_products_of_heads, by_layer, totals))
        if any(edit.is_of_part for run in runs for edit in run):
            self._add_products_of_parts(runs, objectives, totals)
        return [combine(of_run) for of_run in totals]

    def _add_products_of_heads(
        self,
        edits_by_layer: Mapping[int, Mapping[int, list[LayerEdit]]],
        totals: Tensor,
        layer: int,
        z: Tensor,
        call: backend.AttentionCall,
        gradients: Sequence[Tensor],
    ) -> None:
        """Add <gradient, z' - z> of one attention layer to the totals [runs, objectives, n].

        `edits_by_layer` are the edits of the runs by layer and number of the run.
        """
        tokens = torch.arange(self.start, self.ids.shape[1])
        members = [
            (number, edits, _changed_rows(edits, z.shape[1], tokens, self.prompt_length))
            for number, edits in edits_by_layer.get(layer, {}).items()
        ]
        for pack in _disjoint(members):
            change = call.outputs_with([edit for _, edits, _ in pack for edit in edits], z).float() - z.float()
            products = torch.stack([(change * gradient.float()).sum(-1)[0].double().cpu() for gradient in gradients])
            for number, _, rows in pack:
                heads = rows.any(1)
                totals[number] += (products[:, heads] * rows[heads]).sum(1)

    def _add_products_of_parts(self, runs: Sequence[Run], objectives: Sequence[Objective], totals: Tensor) -> None:
        """Add <gradient, change> of parts of decoder layers to the totals [runs, objectives, n]."""
        tokens = torch.arange(self.start, self.ids.shape[1])
        places: dict[tuple[int, str], list[tuple[int, Edit]]] = defaultdict(list)
        for number, run in enumerate(runs):
            for edit in run:
                for layer in edit.layers if edit.is_of_part else ():
                    places[layer, edit.targets[0]].append((number, edit))

        def add(layer: int, old: Tensor, name: str, gradients: list[Tensor]) -> None:
            if (layer, name) not in places:
                return
            old, *gradients = (t[None] if t.dim() == 2 else t for t in (old, *gradients))
            for number, edit in places[layer, name]:
                rows = edit.tokens.contains(tokens, self.prompt_length).nonzero()[:, 0].to(old.device)
                new = edit.kind(old[..., rows, :], layer, tokens.to(old.device)[rows])
                change = new.float() - old[..., rows, :].float()
                for objective, gradient in enumerate(gradients):
                    by_token = (change * gradient[..., rows, :].float()).sum(-1).double().flatten(0, -2).sum(0)
                    totals[number, objective, rows.cpu()] += by_token.cpu()

        wanted = [
            {name: part for name, part in modules.items() if (layer, name) in places}
            for layer, modules in enumerate(self.parts or [{} for _ in self.layers])
        ]
        self.backpropagate_streams(
            objectives,
            wanted,
            lambda layer, gradients: add(layer, self.residual_stream_before(layer), "resid_pre", gradients),
            add,
        )

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
        with torch.enable_grad(), self._reading_text():
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
            rows = slice(positions.start - self.start, positions.stop - self.start)
            chunk = hidden[:, rows].clone().requires_grad_()
            logits, tokens = logits_and_targets(self.model, self._target_ids, chunk, positions)
            logits = logits.float()
            values = [objective(logits, tokens) for objective in objectives]
            for total, (gradient,) in zip(totals, _gradients(values, [chunk], [None] * len(values)), strict=True):
                total[:, rows] = gradient
        return totals


def _changed_rows(edits: Sequence[LayerEdit], heads: int, tokens: Tensor, prompt_length: int) -> Tensor:
    """The head outputs bool [H, n] at these tokens that edits of one layer may change."""
    rows = torch.zeros(heads, len(tokens), dtype=torch.bool)
    for edit in edits:
        is_row_local = edit.target in ("z", "q", "logits")  # a key or value changes all later rows
        own = edit.tokens.contains(tokens, prompt_length) if is_row_local else torch.ones_like(tokens, dtype=torch.bool)
        rows[list(edit.heads)] |= own
    return rows


def _disjoint(
    members: Sequence[tuple[int, list[LayerEdit], Tensor]],
) -> Iterator[list[tuple[int, list[LayerEdit], Tensor]]]:
    """Runs in packs that change no head output in common: the heads of a layer do not affect each other."""
    packs: list[tuple[Tensor, list[tuple[int, list[LayerEdit], Tensor]]]] = []
    for member in members:
        pack = next((pack for pack in packs if not bool((pack[0] & member[2]).any())), None)
        if pack is None:
            packs.append((member[2].clone(), [member]))
        else:
            pack[0].logical_or_(member[2])
            pack[1].append(member)
    return (own for _, own in packs)


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
