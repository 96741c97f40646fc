"""Attach a position scheme to a model and take it off again, exactly.

Frequencies enter through a keyword pre-hook on each attention module, which replaces its cos and sin tables. Where
KV groups differ, the tables are 4-D and the family's own rotation function is folded over groups, so partial and
interleaved rotation stay the family's code. The query scale is an edit in the seam.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import seam
from headscope.attention.geometry import Layout
from headscope.models.bridge import delegated
from headscope.models.survey import namespaces, replaced_rotation
from headscope.positions import lora
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed, Schedule
from headscope.positions.schemes import Scheme
from headscope.positions.syntax import parse

CosSin = tuple[Tensor, Tensor]


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
        stack.enter_context(delegated(model.bridge))
        if isinstance(schedule, AdaRoPE) and schedule.lora is not None:
            stack.enter_context(lora.attached(model, schedule.lora))
        if schedule.rotates:
            cache: dict[str, Any] = {}
            for layer, module in enumerate(model.attention):
                if model.geometry.rotates[layer]:
                    hook = _rotation_hook(schedule, layer, model.rotation.table, cache)
                    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            for namespace in namespaces(model.attention):
                stack.enter_context(replaced_rotation(namespace, folded))
        if schedule.scales_queries:
            stack.enter_context(seam.engaged(model.module))
            for layer, module in enumerate(model.attention):
                stack.enter_context(seam.editing(module, _scale_edit(schedule, layer)))
        yield schedule


def resolve(model: Model, scheme: str | Scheme | Fixed | AdaRoPE | None = None) -> Schedule:
    """The schedule of a scheme for this model; None is the model's own."""
    if scheme is None:
        return model.schedule
    if isinstance(scheme, Fixed | AdaRoPE):
        return scheme
    return (parse(scheme) if isinstance(scheme, str) else scheme).schedule(model.checkpoint)


def cos_sin(positions: Tensor, theta: Tensor, factor: float, table: Layout, dtype: torch.dtype) -> CosSin:
    """cos and sin for positions [B, L] and theta [1|G, P]: [B, L, 2P] if groups share theta, else [B, G, L, 2P].

    Angles are products in theta's float32, as transformers computes them.
    """
    angles = positions[:, None, :, None].to(theta.dtype) * theta.to(positions.device)[None, :, None, :]
    doubled = torch.cat((angles, angles), -1) if table == "half" else angles.repeat_interleave(2, -1)
    cos, sin = ((t * factor).to(dtype) for t in (doubled.cos(), doubled.sin()))
    return (cos[:, 0], sin[:, 0]) if theta.shape[0] == 1 else (cos, sin)


def folded(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """A family's rotation, extended to 4-D tables [B, G, L, 2P] by folding groups into the batch; 3-D ones pass."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.dim() != 4:
            return rotate(q, k, cos, sin, *args, **kwargs)
        batch, heads, length, dim = q.shape
        groups = k.shape[1]
        cos, sin = (t.expand(batch, -1, -1, -1).reshape(batch * groups, length, -1) for t in (cos, sin))
        q_folded = q.reshape(batch * groups, heads // groups, length, dim)
        k_folded = k.reshape(batch * groups, 1, length, k.shape[-1])
        q_turned, k_turned = rotate(q_folded, k_folded, cos, sin, *args, **kwargs)
        return q_turned.reshape(batch, heads, length, dim), k_turned.reshape(batch, groups, length, k.shape[-1])

    return rotated


def _rotation_hook(
    schedule: Schedule, layer: int, table: Layout, cache: dict[str, Any]
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions, (own_cos, _) = kwargs["position_ids"], kwargs["position_embeddings"]
        theta, factor = schedule.theta(layer), schedule.factor(layer)
        known = cache.get("last")
        # Layers that share one theta tensor share one table within a forward pass.
        if known is not None and known[0] is positions and known[1] is theta and known[2] == (factor, own_cos.dtype):
            return args, {**kwargs, "position_embeddings": known[3]}
        embeddings = cos_sin(positions, theta, factor, table, own_cos.dtype)
        cache["last"] = (positions, theta, (factor, own_cos.dtype), embeddings)
        return args, {**kwargs, "position_embeddings": embeddings}

    return hook


def _scale_edit(schedule: Schedule, layer: int) -> seam.LayerEdit:
    def edit(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = schedule.query_scale(layer, positions + 1)[..., None]
        return (q * scale).to(q.dtype), k, v  # the product of bfloat16 and float32 is float32

    return edit
