"""Attach a position scheme to a model, and detach it without a trace.

An attention layer calls its family's rotation function with other cos and sin tables. If KV groups differ, each has its
own table, and heads are folded into the batch, so partial and interleaved rotation remain the family's code. The query
scale is an edit in the attention backend. So are ALiBi's slopes: they are dimensions added to q and k, so that every
reader of q . k includes them.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend, families
from headscope.attention.contexts import entering
from headscope.attention.families.sparse_attention import indexed_queries
from headscope.base.model_spec import SchemeSpec
from headscope.base.public_functions import public_context
from headscope.errors import ResourceMissing, UnsupportedModel
from headscope.models import open_contexts
from headscope.models.bridge import delegating_attention
from headscope.models.interception import intercepting_rotations
from headscope.models.lora import WEIGHTS_FILE, apply_lora, lora_of_adapter
from headscope.models.open_contexts import OpenContext, while_innermost
from headscope.models.rotation import RotationCall, cos_sin_tables, preserving_frequencies, rope_types
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule, Schedule, unsupported_scheme_error
from headscope.positions.schemes import Base, Scheme, parse_scheme


@public_context
def attached(model: Model, scheme: str | Scheme | FixedSchedule | AdaRoPE | None = None) -> Iterator[Schedule]:
    """Run the model under a position scheme inside the `with`; leaving restores the model bit for bit.

    `scheme` is a spec ("yarn:factor=8"), a scheme, a schedule (for example an AdaRoPE in training), or None for the
    model's own, or the one that this model object is already attached to. Of nested contexts the innermost decides.
    Probes measure the model under the attached scheme, and record it as the model's scheme. Yields the schedule.

    Works with full passes, cached generation, padded batches, every dtype, gradient checkpointing and LoRA. The scheme
    applies in every thread that runs the model; other models are not affected. Contexts may end in any order. Raises
    UnsupportedModel if the scheme cannot be applied to the model, BadInput if another thread has a context open on it.
    """
    outer = open_contexts.attached_scheme(model.module)
    if outer is not None and scheme is None and outer.model is model:
        schedule, spec = outer.schedule, outer.scheme_spec
    else:
        schedule, spec = resolve_schedule(model, scheme), _scheme_spec(model, scheme)
    context = OpenContext(f"hs.attached({spec.text})", model, spec, schedule)
    with ExitStack() as stack:
        stack.enter_context(entering(model.module))
        stack.enter_context(open_contexts.entered(model.module, context))
        # A TransformerBridge rotates and attends with its own code unless it delegates to the wrapped module.
        stack.enter_context(delegating_attention(model.bridge))
        is_lora_attached = outer is not None and outer.schedule is schedule
        if isinstance(schedule, AdaRoPE) and schedule.lora_folder is not None and not is_lora_attached:
            stack.enter_context(_attaching_lora(model, schedule.lora_folder))
        if schedule.replaces_rotation:
            stack.enter_context(_replacing_rotation(model, schedule, context))
        elif model.rotation.frequency_change_length is not None:
            stack.enter_context(_refusing_frequency_changes(model, model.rotation.frequency_change_length))
        if schedule.scales_queries or schedule.slopes is not None:
            stack.enter_context(backend.using_backend(model.module))
        if schedule.scales_queries:
            for layer, module in enumerate(model.attention_modules):
                edit = while_innermost(model.module, context, _query_scale_edit(schedule, layer))
                stack.enter_context(backend.editing_qkv(module, edit))
        if schedule.slopes is not None:
            stack.enter_context(_adding_slopes(model, schedule.slopes, context))
        yield schedule


def _scheme_spec(model: Model, scheme: str | Scheme | FixedSchedule | AdaRoPE | None) -> SchemeSpec:
    """The scheme as text for the runs of a model that is attached to it; an object in memory has its kind's name."""
    if isinstance(scheme, str):
        return SchemeSpec.parse(scheme)
    if scheme is None or scheme is model.schedule:
        return model.scheme_spec
    name = "adarope" if isinstance(scheme, AdaRoPE) else "schedule in memory"
    return SchemeSpec(name, name)


def resolve_schedule(model: Model, scheme: str | Scheme | FixedSchedule | AdaRoPE | None = None) -> Schedule:
    """The schedule of a scheme for this model; None is the model's own scheme."""
    if scheme is None:
        return model.schedule
    if isinstance(scheme, FixedSchedule | AdaRoPE):
        return scheme
    parsed = parse_scheme(scheme) if isinstance(scheme, str) else scheme
    return Model(model.checkpoint).schedule if isinstance(parsed, Base) else parsed.schedule(model.checkpoint)


@contextmanager
def _attaching_lora(model: Model, folder: Path) -> Iterator[None]:
    """Run the model with a stored LoRA inside the `with`. Raises ResourceMissing if it does not exist."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise ResourceMissing(
            f"no LoRA at '{folder}', but the adapter was trained with one. Copy it into the adapter's folder"
        )
    requires_grad = {name: parameter.requires_grad for name, parameter in model.module.named_parameters()}
    peft_model = apply_lora(model.module, folder, model.name)
    try:
        with lora_of_adapter(model.module):
            yield
    finally:
        peft_model.unload()
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_(requires_grad[name])


@contextmanager
def _replacing_rotation(model: Model, schedule: Schedule, context: OpenContext) -> Iterator[None]:
    """Rotate q and k of every rotating layer by the schedule's frequencies, while its context is the innermost."""
    layers = {
        module: layer for layer, module in enumerate(model.attention_modules) if model.geometry.layer_rotates[layer]
    }
    running = _RunningPass()
    last_tables: tuple[Tensor, Tensor, tuple[float, torch.dtype], Any] | None = None

    def rotate(module: nn.Module, call: RotationCall) -> Any:
        nonlocal last_tables
        if open_contexts.attached_scheme(model.module) is not context:
            return None
        positions, theta, dtype = running.positions, schedule.theta(layers[module]), call.tables[0].dtype
        factor = schedule.attention_factor(layers[module])
        if running.is_in_indexer:
            if theta.shape[0] > 1:  # its heads belong to no KV group and keep the checkpoint's rotation
                return None
            positions = _indexer_positions(module, call, positions)
        elif positions.shape[1] > call.tables[0].shape[-2]:  # Qwen4's rotary module gets those of cached tokens, too
            positions = positions[:, -call.tables[0].shape[-2] :]
        # Layers that share one theta tensor share one table within a forward pass.
        last = last_tables
        if last is None or last[0] is not positions or last[1] is not theta or last[2] != (factor, dtype):
            tables = cos_sin_tables(positions, theta, factor, model.rotation.table_layout, dtype)
            last = last_tables = (positions, theta, (factor, dtype), tables)
        if theta.shape[0] == 1:
            return call.run(tuple(table.squeeze(0) if call.tables[0].ndim == 2 else table for table in last[3]))
        return call.run_per_group(last[3])

    with ExitStack() as stack:
        for module in layers:
            stack.callback(module.register_forward_pre_hook(running.enter_layer, with_kwargs=True).remove)
        for module in model.rotation.rotary_modules:
            stack.callback(module.register_forward_pre_hook(running.record_positions, with_kwargs=True).remove)
        for module in families.indexers(model.module):
            stack.callback(module.register_forward_pre_hook(running.enter_indexer).remove)
            stack.callback(module.register_forward_hook(running.leave_indexer, always_call=True).remove)
        stack.enter_context(intercepting_rotations(layers, rotate))
        stack.enter_context(preserving_frequencies(model.rotation.rotary_modules))
        yield


@contextmanager
def _refusing_frequency_changes(model: Model, change_length: int) -> Iterator[None]:
    """Refuse cached decoding across a change of the checkpoint's own frequencies: cached keys have the old ones.

    `change_length` is the longest text in tokens with the original frequencies.
    """
    cached_length = change_length

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal cached_length
        positions = _position_ids(args, kwargs)
        first, length = int(positions.min()), max(int(positions.max()) + 1, change_length)
        if "longrope" in rope_types(module):  # one set of frequencies for all longer texts
            length = min(length, change_length + 1)
        elif first == 0:
            _reset_dynamic_frequencies(module, change_length)
        if first == 0:
            cached_length = length
        elif length != cached_length:
            raise UnsupportedModel(
                f"'{model.name}' changes its rotary frequencies beyond {change_length} tokens, so keys that it "
                f"cached before cannot be reused. Keep texts within {change_length} tokens, or apply a "
                "scheme such as @yarn:factor=4"
            )

    with ExitStack() as stack:
        for module in model.rotation.rotary_modules:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        stack.enter_context(preserving_frequencies(model.rotation.rotary_modules))
        yield


def _reset_dynamic_frequencies(module: nn.Module, change_length: int) -> None:
    """Restore the frequencies of a short text: dynamic RoPE would keep those of the longest text so far."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(module, name.replace("original_", ""), buffer)
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, change_length)


class _RunningPass:
    """The positions [1|B, L] of the tokens in the pass that the calling thread runs."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._last_recorded = torch.zeros(1, 0)

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens in the running attention layer."""
        positions: Tensor = self._thread.positions
        return positions

    @property
    def is_in_indexer(self) -> bool:
        """Whether an indexer is choosing keys."""
        return bool(getattr(self._thread, "is_in_indexer", False))

    def enter_indexer(self, *_: Any) -> None:
        self._thread.is_in_indexer = True

    def leave_indexer(self, *_: Any) -> None:
        self._thread.is_in_indexer = False

    def enter_layer(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if positions is None or positions.dim() != 2:
            # Some families pass no positions to attention, or three rows of them; their rotary module has them. A
            # thread of autograd that recomputes a layer runs no rotary module.
            positions = getattr(self._thread, "recorded", self._last_recorded)
        self._thread.positions = positions

    def record_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        positions = _position_ids(args, kwargs)
        if positions.dim() == 3:  # time, height and width, which are equal for text
            if not (positions == positions[:1]).all():
                raise UnsupportedModel("the input contains an image. Position schemes support text only")
            positions = positions[0]
        self._thread.recorded = self._last_recorded = positions


def _indexer_positions(module: Any, call: RotationCall, positions: Tensor) -> Tensor:
    """Positions [1|B, n] of what an indexer rotates: tokens, or blocks of keys by their first token (Qwen4)."""
    if call.tables[0].ndim == 3:
        return positions[:, indexed_queries()][:, -call.tables[0].shape[-2] :]
    ratio: int = module.indexer.compress_ratio
    return torch.arange(0, ratio * len(call.tables[0]), ratio, device=positions.device)[None]


def _position_ids(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The position ids among the arguments of a rotary module."""
    positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    return positions


def _query_scale_edit(schedule: Schedule, layer: int) -> backend.QKVEdit:
    def edit(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = schedule.query_scale(layer, positions + 1)[..., None]
        return (q * scale).to(q.dtype), k, v  # the product of bfloat16 and float32 is float32

    return edit


SLOPE_DIMENSIONS = 8
"""Dimensions added to q and k for the slopes. Two are used; attention kernels prefer multiples of 8."""


@contextmanager
def _adding_slopes(model: Model, slopes: Tensor, context: OpenContext) -> Iterator[None]:
    """Decrease the logits of head h by slopes[h] for every token between query and key.

    k gets its cache index j and 1; q gets slope / scaling times 1 and times -i. So scaling q . k increases by
    slope (j - i). Cache indices differ from positions by the same number for all keys of a row, which a softmax
    ignores. Raises UnsupportedModel below float32, which is too coarse for positions, and for capped logits, because
    the cap would follow the slopes.
    """
    scaling_by_module: dict[nn.Module, float] = {}

    def record_scaling(module: nn.Module, *_: Any, scaling: float, softcap: float | None, **__: Any) -> None:
        if softcap is not None:
            raise unsupported_scheme_error(model, "alibi", "it caps its logits")
        scaling_by_module[module] = scaling

    def slope_edit(module: nn.Module) -> backend.QKVEdit:
        def edit(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if q.dtype.itemsize < 4:
                dtype = str(q.dtype).removeprefix("torch.")
                raise UnsupportedModel(f"alibi needs float32, but '{model.name}' is {dtype}. Open it with --dtype fp32")
            slope = (slopes.to(q) / scaling_by_module[module])[None, :, None].expand(len(q), -1, q.shape[2])
            dim = q.shape[-1]
            q, k = (nn.functional.pad(t, (0, SLOPE_DIMENSIONS)) for t in (q, k))
            q[..., dim], q[..., dim + 1] = slope, -slope * positions[:, None].to(q)
            k[..., dim], k[..., dim + 1] = torch.arange(k.shape[2]).to(k), 1
            return q, k, v

        return edit

    with ExitStack() as stack:
        stack.enter_context(backend.observing_calls(model.attention_modules, record_scaling))
        for module in model.attention_modules:
            edit = while_innermost(model.module, context, slope_edit(module))
            stack.enter_context(backend.adding_bias(module, edit))
        yield
