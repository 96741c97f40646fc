"""Attach a position scheme to a model and take it off again, exactly.

Frequencies enter where an attention layer calls its family's rotation function: it runs on other cos and sin tables.
Where KV groups differ, there is a table for each group, and heads are folded into the batch, so partial and
interleaved rotation stay the family's code. The query scale is an edit in the seam, and so are slopes: they become
dimensions that are added to q and k, so that every reader of q . k reads them too.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.errors import UnsupportedModel
from headscope.models.bridge import delegating_attention
from headscope.models.rotation import (
    RotationCall,
    cos_sin_tables,
    intercepting_rotations,
    preserving_frequencies,
    rope_types,
)
from headscope.positions import lora
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed, Schedule
from headscope.positions.scheme_syntax import parse_scheme
from headscope.positions.schemes import Base, Scheme


@contextmanager
def attached(model: Model, scheme: str | Scheme | Fixed | AdaRoPE | None = None) -> Iterator[Schedule]:
    """Run the model under a position scheme inside the `with`; leaving restores it bit for bit.

    `scheme` is the text of one ("yarn:factor=8"), a scheme, a schedule (an AdaRoPE with live parameters, say), or None
    for the model's own. Yields the schedule. Works in full passes, cached generation, padded batches, any dtype,
    gradient checkpointing and under LoRA.
    """
    schedule = resolve(model, scheme)
    with ExitStack() as stack:
        # A TransformerBridge rotates and attends by its own code unless it runs the wrapped module's.
        stack.enter_context(delegating_attention(model.bridge))
        if isinstance(schedule, AdaRoPE) and schedule.lora is not None:
            stack.enter_context(lora.attached(model, schedule.lora))
        if schedule.rotates:
            stack.enter_context(_rotating(model, schedule))
        elif model.rotation.frequency_change_length is not None:
            stack.enter_context(_steady(model, model.rotation.frequency_change_length))
        if schedule.scales_queries or schedule.slopes is not None:
            stack.enter_context(backend.using_backend(model.module))
        if schedule.scales_queries:
            for layer, module in enumerate(model.attention_modules):
                stack.enter_context(backend.editing_qkv(module, _scale_edit(schedule, layer)))
        if schedule.slopes is not None:
            stack.enter_context(_falling(model, schedule.slopes))
        yield schedule


def resolve(model: Model, scheme: str | Scheme | Fixed | AdaRoPE | None = None) -> Schedule:
    """The schedule of a scheme for this model; None is the model's own."""
    if scheme is None:
        return model.schedule
    if isinstance(scheme, Fixed | AdaRoPE):
        return scheme
    rule = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    return Model(model.checkpoint).schedule if isinstance(rule, Base) else rule.schedule(model.checkpoint)


@contextmanager
def _rotating(model: Model, schedule: Schedule) -> Iterator[None]:
    """Let every layer that rotates do so by the schedule's frequencies."""
    now = _Now()
    made: dict[str, Any] = {}

    def turned(turn: RotationCall) -> Any:
        if now.layer is None:  # another tower's rotation, or another model's
            return None
        theta, factor, dtype = schedule.theta(now.layer), schedule.factor(now.layer), turn.tables[0].dtype
        known = made.get("last")
        # Layers that share one theta tensor share one table within a forward pass.
        if known is None or known[0] is not now.positions or known[1] is not theta or known[2] != (factor, dtype):
            new = cos_sin_tables(now.positions, theta, factor, model.rotation.table_layout, dtype)
            made["last"] = known = (now.positions, theta, (factor, dtype), new)
        return turn.run(known[3]) if theta.shape[0] == 1 else turn.run_per_group(known[3])

    with ExitStack() as stack:
        for layer, module in enumerate(model.attention_modules):
            if model.geometry.layer_rotates[layer]:
                stack.callback(module.register_forward_pre_hook(now.enter(layer), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(now.leave, always_call=True).remove)
        for module in model.rotation.rotary_modules:
            stack.callback(module.register_forward_pre_hook(now.note, with_kwargs=True).remove)
        stack.enter_context(intercepting_rotations(model.attention_modules, turned))
        yield


@contextmanager
def _steady(model: Model, until: int) -> Iterator[None]:
    """Refuse to go on with a cached text where its own frequencies change: its keys were turned by the others."""
    begun = until

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal begun
        positions = _given(args, kwargs)
        first, length = int(positions.min()), max(int(positions.max()) + 1, until)
        if "longrope" in rope_types(module):  # one other set, however long the text
            length = min(length, until + 1)
        elif first == 0:
            _forget(module, until)
        if first == 0:
            begun = length
        elif length != begun:
            raise UnsupportedModel(
                f"'{model.name}' turns by other frequencies in a text of more than {until} tokens, so keys kept from "
                "before do not fit: keep texts within that, or put a scheme on it (@yarn:factor=4)"
            )

    with ExitStack() as stack:
        for module in model.rotation.rotary_modules:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        stack.enter_context(preserving_frequencies(model.rotation.rotary_modules))
        yield


def _forget(module: nn.Module, until: int) -> None:
    """Back to the frequencies of a short text: dynamic ones would stay those of the longest text before."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(module, name.replace("original_", ""), buffer)
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, until)


class _Now:
    """The attention layer that is running, and the positions [1|B, L] of its tokens."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self.positions = self._noted = torch.zeros(1, 0)

    def enter(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.layer = layer
            given = kwargs.get("position_ids")
            # Some families tell their attention no positions, or three of them; what made its tables knew them.
            self.positions = given if given is not None and given.dim() == 2 else self._noted

        return hook

    def leave(self, *_: Any) -> None:
        self.layer = None

    def note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = _given(args, kwargs)
        if positions.dim() == 3:  # of time, height and width, which agree for text
            if not (positions == positions[:1]).all():
                raise UnsupportedModel("positions of an image reached the model; a position scheme serves text alone")
            positions = positions[0]
        self._noted = positions


def _given(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The positions that a module is given to compute cos and sin for."""
    positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    return positions


def _scale_edit(schedule: Schedule, layer: int) -> backend.QKVEdit:
    def edit(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = schedule.query_scale(layer, positions + 1)[..., None]
        return (q * scale).to(q.dtype), k, v  # the product of bfloat16 and float32 is float32

    return edit


DISTANCE_DIMS = 8
"""Dimensions that hold distances, two of them used; kernels like multiples of 8."""


@contextmanager
def _falling(model: Model, slopes: Tensor) -> Iterator[None]:
    """Let the logits of head h fall by slopes[h] for every token between query and key.

    k gets its slot j and 1, q gets slope / scaling times 1 and times -i, so that scaling q . k has slope (j - i) more.
    Slots and positions differ by the same for all keys of a row, which no softmax sees. Raises UnsupportedModel below
    float32, which cannot hold such numbers, and where logits are capped after the slopes.
    """
    scalings: dict[nn.Module, float] = {}

    def witness(module: nn.Module, *_: Any, scaling: float, softcap: float | None, **__: Any) -> None:
        if softcap is not None:
            raise UnsupportedModel(f"cannot put alibi on '{model.name}': it caps its logits")
        scalings[module] = scaling

    def sloping(module: nn.Module) -> backend.QKVEdit:
        def edit(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if q.dtype.itemsize < 4:
                raise UnsupportedModel(f"alibi needs float32, '{model.name}' is {q.dtype}: open it with --dtype fp32")
            rise = (slopes.to(q) / scalings[module])[None, :, None].expand(len(q), -1, q.shape[2])
            dim = q.shape[-1]
            q, k = (nn.functional.pad(t, (0, DISTANCE_DIMS)) for t in (q, k))
            q[..., dim], q[..., dim + 1] = rise, -rise * positions[:, None].to(q)
            k[..., dim], k[..., dim + 1] = torch.arange(k.shape[2]).to(k), 1
            return q, k, v

        return edit

    with ExitStack() as stack:
        stack.enter_context(backend.observing_calls(witness))
        for module in model.attention_modules:
            stack.enter_context(backend.editing_qkv(module, sloping(module)))
        yield
