"""How a checkpoint rotates: seen in a three-token forward pass, not assumed from its family's name.

The survey finds the attention modules in order, which of them rotate, how many dimensions, which two
dimensions form a pair, how the cos/sin tables are laid out, and the frequencies of each layer, and checks
that the tables do follow those frequencies.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import seam
from headscope.attention.geometry import Layout
from headscope.errors import HeadscopeError, UnsupportedModel

ROTATE = "apply_rotary_pos_emb"


@dataclass(frozen=True, eq=False)
class BaseRotation:
    """The checkpoint's own rotation.

    theta [layers, pairs] rad/token, float32, 0 in layers that do not rotate; `factors` what each layer's cos
    and sin are multiplied by; `layout` of the pairs in a head; `table` the order of the entries of cos and sin;
    `layer_types` names the frequency set of each layer (None where the model has one).
    """

    theta: Tensor
    factors: tuple[float, ...]
    layout: Layout
    table: Layout
    layer_types: tuple[str | None, ...]

    @property
    def pairs(self) -> int:
        return self.theta.shape[1]


@dataclass(frozen=True, eq=False)
class Survey:
    """What the survey saw: attention modules by layer, (heads, kv groups, head_dim), windows, rotation."""

    modules: tuple[nn.Module, ...]
    shape: tuple[int, int, int]
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    rotation: BaseRotation


def survey(model: PreTrainedModel) -> Survey:
    """Run three tokens through the seam and read the geometry. Raises UnsupportedModel, saying why."""
    calls = _attention_calls(model)
    modules = tuple(call.module for call in calls)
    shapes = {call.shape for call in calls}
    if len(shapes) > 1:
        raise _refusal(model, f"its layers differ in heads or head_dim {sorted(shapes)}")
    rotations = _rotations(model, modules)
    if not any(rotations):
        raise _refusal(model, "none of its attention layers rotates q and k by position_embeddings")
    seen = [r for r in rotations if r is not None]
    if len({(r.pairs, r.layout, r.table) for r in seen}) > 1:
        raise _refusal(model, "its layers differ in rotary dimensions or layout")
    first = seen[0]
    layer_types = _layer_types(model, len(modules))
    theta = torch.zeros(len(modules), first.pairs)
    factors = []
    for layer, (rotation, layer_type) in enumerate(zip(rotations, layer_types, strict=True)):
        inv_freq, factor = _frequencies(model, layer_type)
        factors.append(factor)
        if rotation is not None:
            theta[layer] = inv_freq
            expected = torch.cos(rotation.position * inv_freq) * factor
            if not torch.allclose(rotation.cos, expected, atol=2e-2):
                raise _refusal(model, "its rotary tables do not follow its inv_freq")
    return Survey(
        modules=modules,
        shape=next(iter(shapes)),
        windows=tuple(call.window for call in calls),
        rotates=tuple(r is not None for r in rotations),
        rotation=BaseRotation(theta, tuple(factors), first.layout, first.table, layer_types),
    )


def native_context(config: Any) -> int:
    """The context length the checkpoint was trained for, in tokens."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(r for r in rope.values() if isinstance(r, dict))]
    originals = [r["original_max_position_embeddings"] for r in ropes if r.get("original_max_position_embeddings")]
    return int(min(originals, default=config.max_position_embeddings))


@contextmanager
def replaced_rotation(
    namespace: ModuleType, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wrap a family's rotation function in its module's namespace; the original returns on exit."""
    original = getattr(namespace, ROTATE)
    setattr(namespace, ROTATE, wrap(original))
    try:
        yield
    finally:
        setattr(namespace, ROTATE, original)


def namespaces(modules: tuple[nn.Module, ...]) -> list[ModuleType]:
    """The Python modules whose rotation function these attention modules call."""
    homes = {type(module).__module__: sys.modules[type(module).__module__] for module in modules}
    return [namespace for namespace in homes.values() if hasattr(namespace, ROTATE)]


@dataclass(frozen=True)
class _Call:
    module: nn.Module
    shape: tuple[int, int, int]
    window: int | None


@dataclass(frozen=True, eq=False)
class _Rotation:
    """One layer's rotation at one position: cos [pairs] as the model made it, in pair order."""

    pairs: int
    layout: Layout
    table: Layout
    position: int
    cos: Tensor


def _attention_calls(model: PreTrainedModel) -> list[_Call]:
    calls: list[_Call] = []

    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise _refusal(model, "it attends in both directions")

    def witness(module: nn.Module, q: Tensor, k: Tensor, scaling: float, window: int | None, **kwargs: Any) -> None:
        for name, why in (
            ("softcap", "its attention logits are soft-capped"),
            ("s_aux", "its softmax has a learned sink term"),
        ):
            if kwargs.get(name) is not None:
                raise _refusal(model, why)
        if q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
            raise _refusal(model, "its q and k heads do not match")
        calls.append(_Call(module, (q.shape[1], k.shape[1], q.shape[-1]), window))

    with seam.witnessed(witness):
        _three_tokens(model)
    layers = model.config.get_text_config().num_hidden_layers
    if len(calls) != layers:
        raise _refusal(model, f"{len(calls)} of its {layers} layers use the attention interface of transformers")
    return calls


def _rotations(model: PreTrainedModel, modules: tuple[nn.Module, ...]) -> list[_Rotation | None]:
    current: list[int] = []
    seen: dict[int, _Rotation] = {}

    def enter(layer: int) -> Callable[..., None]:
        return lambda *_: current.append(layer)

    def wrap(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def watched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen[current[-1]] = _look(rotate, q, cos, sin, *args, **kwargs)
            return rotate(q, k, cos, sin, *args, **kwargs)

        return watched

    with ExitStack() as stack:
        for layer, module in enumerate(modules):
            stack.callback(module.register_forward_pre_hook(enter(layer)).remove)
        for namespace in namespaces(modules):
            stack.enter_context(replaced_rotation(namespace, wrap))
        _three_tokens(model)
    return [seen.get(layer) for layer in range(len(modules))]


def _look(rotate: Callable[..., Any], q: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> _Rotation:
    rotary_dims = cos.shape[-1]
    pairs = rotary_dims // 2
    unit = torch.zeros_like(q[:1, :1])
    unit[..., 0] = 1.0
    turned = rotate(unit, unit, cos[:1], sin[:1], *args, **kwargs)[0][0, 0, -1]
    partner = int(turned[1:].abs().argmax()) + 1
    layout: Layout = "half" if partner == pairs else "interleaved"
    halves = torch.equal(cos[0, :, :pairs], cos[0, :, pairs:])
    last = cos[0, -1].float().cpu()
    return _Rotation(
        pairs, layout, "half" if halves else "interleaved", cos.shape[1] - 1, last[:pairs] if halves else last[::2]
    )


def _three_tokens(model: PreTrainedModel) -> None:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), seam.engaged(model):
            model(torch.arange(3, device=model.device)[None], use_cache=False)
    except HeadscopeError:
        raise
    except Exception as error:  # whatever the model's own code makes of an odd config
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _refusal(model, f"three tokens do not go through it ({why})") from error
    finally:
        model.train(was_training)


def _layer_types(model: PreTrainedModel, layers: int) -> tuple[str | None, ...]:
    types = getattr(model.config.get_text_config(), "layer_types", None)
    if types and any(hasattr(m, f"{types[0]}_inv_freq") for m in model.modules()):
        return tuple(types)
    return (None,) * layers


def _frequencies(model: PreTrainedModel, layer_type: str | None) -> tuple[Tensor, float]:
    """inv_freq [pairs] (float32, cpu) and attention factor of one frequency set."""
    prefix = f"{layer_type}_" if layer_type else ""
    for module in model.modules():
        inv_freq = getattr(module, f"{prefix}inv_freq", None)
        if isinstance(inv_freq, Tensor):
            return inv_freq.detach().float().cpu(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
    raise _refusal(model, "it has no rotary embedding module with inv_freq")


def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"cannot measure this {model.config.model_type} model: {why}")
