"""How a checkpoint attends and rotates: seen in a three-token forward pass, not assumed from its family's name.

The survey finds the attention modules in order, which of them rotate, how many dimensions, which two dimensions
form a pair, where in the head they lie, how the cos/sin tables are laid out, and the frequencies of each layer, and
checks that q and k are turned by those frequencies. Modules that no text reaches (a vision tower, say) are not seen.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import backend
from headscope.attention.geometry import RotaryLayout
from headscope.attention.masks import UnsupportedMask
from headscope.errors import HeadscopeError, UnsupportedModel, first_line
from headscope.models.eval_mode import inference
from headscope.models.rotation import Planes, Table, Turn, intercepted, rope_kinds, seen
from headscope.models.unsupported import attends, native_context

TOKENS = 3


@dataclass(frozen=True, eq=False)
class BaseRotation:
    """The checkpoint's own rotation.

    theta [layers, pairs] rad/token, float32, 0 in layers that do not rotate; `factors` what each layer's cos
    and sin are multiplied by, 1 where that changes no logit (`scales`: q and k are normed afterwards); `layout` of the
    pairs in a head, which begin at dimension `start`, and the `direction` they turn in; `table` the order of the
    entries of cos and sin; `layer_types` names the frequency set of each layer (None where the model has one).
    `modules` compute the tables, from other frequencies where a text is longer than `until`; `shared_keys` where a
    layer may attend to the keys that another has turned. Where there are no pairs, `why` tells.
    """

    theta: Tensor
    factors: tuple[float, ...]
    layout: RotaryLayout
    table: Table
    layer_types: tuple[str | None, ...]
    start: int = 0
    direction: Literal[1, -1] = 1
    scales: bool = True
    modules: tuple[nn.Module, ...] = ()
    until: int | None = None
    shared_keys: bool = False
    why: str = ""

    @classmethod
    def none(cls, layers: int, why: str) -> "BaseRotation":
        """No rotary pairs in any layer."""
        return cls(torch.zeros(layers, 0), (1.0,) * layers, "half", "half", (None,) * layers, why=why)

    @property
    def pairs(self) -> int:
        return self.theta.shape[1]


@dataclass(frozen=True, eq=False)
class Survey:
    """What was seen: attention modules by layer, their numbers, (heads, kv groups, head_dim), windows, rotation."""

    modules: tuple[nn.Module, ...]
    numbers: tuple[int, ...]
    shape: tuple[int, int, int]
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    rotation: BaseRotation


def survey(model: PreTrainedModel) -> Survey:
    """Run three tokens through the seam and read the geometry. Raises UnsupportedModel, saying why."""
    calls = _attention_calls(model)
    shapes = {call.shape[:2] for call in calls}
    if len(shapes) > 1:
        raise _refusal(model, f"its layers differ in heads or key heads {sorted(shapes)}")
    modules = tuple(call.module for call in calls)
    numbers = _numbers(model, modules)
    rotation = _rotation(model, calls, numbers)
    return Survey(
        modules=modules,
        numbers=numbers,
        shape=max(call.shape for call in calls),
        windows=tuple(call.window for call in calls),
        rotates=tuple(bool(call.turns) and rotation.pairs > 0 for call in calls),
        rotation=rotation,
    )


@dataclass(frozen=True, eq=False)
class _Call:
    """One attention call: what the seam was given, and the rotations [q, k] or [q and k] that came before it."""

    module: nn.Module
    q: Tensor
    groups: int
    window: int | None
    turns: list["_Turned"]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.q.shape[1], self.groups, self.q.shape[3])


@dataclass(frozen=True, eq=False)
class _Turned:
    """One call of a rotation function, and the first vectors that it returned, [B, H, L, d]."""

    turn: Turn
    result: Tensor


def _attention_calls(model: PreTrainedModel) -> list[_Call]:
    calls: list[_Call] = []
    turned: list[_Turned] = []

    def turning(turn: Turn) -> Any:
        result = turn.run()
        first = result if isinstance(result, Tensor) else result[0]
        turned.append(_Turned(turn, first if turn.heads_axis == 1 else first.transpose(1, 2)))
        return result

    def witness(module: nn.Module, q: Tensor, k: Tensor, window: int | None, **kwargs: Any) -> None:
        if getattr(module, "is_causal", True) is False:
            raise _refusal(model, "it attends in both directions")
        if q.shape[-1] != k.shape[-1] or q.shape[1] % k.shape[1]:
            raise _refusal(model, "its q and k heads do not match")
        calls.append(_Call(module, q.detach(), k.shape[1], window, turned.copy()))
        turned.clear()

    with backend.observing_calls(witness), intercepted(model.modules(), turning):
        _three_tokens(model)
    if not calls:
        raise _refusal(model, "none of its layers uses the attention interface of transformers")
    if len({call.module for call in calls}) < len(calls):
        raise _refusal(model, "one of its attention modules runs several times in a pass, as several layers")
    return calls


def _numbers(model: PreTrainedModel, modules: tuple[nn.Module, ...]) -> tuple[int, ...]:
    """The layers' true numbers: where their modules stand in the model's list of layers."""
    names = {module: name for name, module in model.named_modules()}
    found = [re.search(r"\.(\d+)\.", names[module]) for module in modules]
    numbers = tuple(int(each[1]) if each else -1 for each in found)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is not None and len(kinds) == config.num_hidden_layers:
        expected = tuple(number for number, kind in enumerate(kinds) if attends(kind))
    else:
        expected = tuple(range(getattr(config, "decoder_layers", config.num_hidden_layers)))
    if numbers != expected:
        shown = f"{len(set(numbers) & set(expected))} of its {len(expected)} attention layers"
        raise _refusal(model, f"{shown} use the attention interface of transformers")
    return numbers


def _rotation(model: PreTrainedModel, calls: list[_Call], numbers: tuple[int, ...]) -> BaseRotation:
    layers = len(calls)
    planes = {at: _planes(model, call) for at, call in enumerate(calls) if call.turns}
    if not planes:
        return BaseRotation.none(layers, "it does not rotate its heads")
    if len({call.shape for call in calls}) > 1:
        return BaseRotation.none(layers, "its layers differ in head_dim")
    after = {_after(model, calls[at]) for at in planes}
    if "else" in after:
        return BaseRotation.none(layers, "what it does to its heads after rotating them leaves no pairs")
    first = next(iter(planes.values()))
    starts = {_start(model, calls[at]) for at in planes}
    alike = {(each.pairs, each.layout, each.table, each.direction) for each in planes.values()}
    if len(alike) > 1 or len(starts) > 1:
        raise _refusal(model, "its layers differ in rotary dimensions or layout")
    sources = list(_sources(model, first.pairs))
    theta = torch.zeros(layers, first.pairs)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    chosen = {at: _closest(model, sources, each, kinds and kinds[numbers[at]]) for at, each in planes.items()}
    for at, source in chosen.items():
        theta[at] = source.theta
    scales = after == {"nothing"} or _factor_counts(model, calls[next(iter(planes))])
    modules = tuple(dict.fromkeys(source.module for source in chosen.values()))
    return BaseRotation(
        theta=theta,
        factors=tuple(chosen[at].factor if at in chosen and scales else 1.0 for at in range(layers)),
        layout=first.layout,
        table=first.table,
        layer_types=tuple(chosen[at].layer_type if at in chosen else None for at in range(layers)),
        start=starts.pop(),
        direction=first.direction,
        scales=scales,
        modules=modules,
        until=min(filter(None, map(_until, modules)), default=None),
        shared_keys=len({len(calls[at].turns) for at in planes}) > 1,
    )


def _planes(model: PreTrainedModel, call: _Call) -> Planes:
    planes = seen(call.turns[0].turn)
    if planes is None:
        raise _refusal(model, "its rotation does not turn pairs of dimensions in one of the known layouts")
    return planes


def _start(model: PreTrainedModel, call: _Call) -> int:
    """The dimension of the head at which what the rotation returned begins."""
    turned = call.turns[0].result
    given, dims = turned.shape[-1], call.q.shape[-1]
    if given == dims:
        return 0
    for start in (0, dims - given):
        if turned.shape[:-1] == call.q.shape[:-1] and torch.equal(call.q[..., start : start + given], turned):
            return start
    raise _refusal(model, "its rotated dimensions lie neither at the start nor at the end of its heads")


def _after(model: PreTrainedModel, call: _Call) -> Literal["nothing", "a multiple", "else"]:
    """What happens to q between rotation and kernel: a norm or a temperature gives a multiple of each vector."""
    turned, q = call.turns[0].result.float(), call.q.float()
    if turned.shape[-1] < q.shape[-1] or torch.equal(turned, q):
        return "nothing"
    before, now = (nn.functional.normalize(each, dim=-1) for each in (turned, q))
    return "a multiple" if torch.allclose(before, now, atol=1e-2) else "else"


def _factor_counts(model: PreTrainedModel, call: _Call) -> bool:
    """Whether doubled cos and sin double q at the kernel, or a norm after the rotation undoes them."""
    ratios: list[float] = []

    def doubled(turn: Turn) -> Any:
        return turn.run(tuple(2 * table for table in turn.tables))

    def witness(module: nn.Module, q: Tensor, k: Tensor, **kwargs: Any) -> None:
        if module is call.module:
            ratios.append(float(q.norm() / call.q.norm()))

    with backend.observing_calls(witness), intercepted(model.modules(), doubled):
        _three_tokens(model)
    return ratios[0] > 1.5


@dataclass(frozen=True, eq=False)
class _Source:
    """One set of frequencies [pairs], float32 on cpu, of a module that computes cos and sin."""

    module: nn.Module
    layer_type: str | None
    theta: Tensor
    factor: float


def _sources(model: PreTrainedModel, pairs: int) -> Iterator[_Source]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            prefix = name.removesuffix("inv_freq")
            if prefix != name and not prefix.endswith("original_") and buffer.shape == (pairs,):
                factor = float(getattr(module, f"{prefix}attention_scaling", None) or 1.0)
                yield _Source(module, prefix.removesuffix("_") or None, buffer.detach().float().cpu(), factor)


def _closest(model: PreTrainedModel, sources: list[_Source], planes: Planes, kind: str | None) -> _Source:
    """The frequencies by which the planes were turned; of equal sets, that of the layer's own kind."""

    def error(source: _Source) -> float:
        angles = (TOKENS - 1) * source.theta
        expected = torch.stack((angles.cos(), angles.sin())) * source.factor
        return float((torch.stack((planes.cos, planes.sin)) - expected).abs().max())

    best = min(sources, key=lambda source: (error(source), source.layer_type != kind), default=None)
    if best is None:
        raise _refusal(model, "it has no rotary embedding module with inv_freq")
    if error(best) > 2e-2:
        raise _refusal(model, "its q and k are not turned by its inv_freq")
    return best


def _until(module: nn.Module) -> int | None:
    """The length of text beyond which a module computes cos and sin from other frequencies."""
    return native_context(module.config) if rope_kinds(module) & {"dynamic", "longrope"} else None


def _three_tokens(model: PreTrainedModel) -> None:
    try:
        with inference(model), backend.using_backend(model):
            model(torch.arange(TOKENS, device=model.device)[None], use_cache=False)
    except UnsupportedMask as error:
        raise _refusal(model, "it masks its attention in a way of its own") from error
    except HeadscopeError as error:
        # The seam does not know whose attention it serves.
        raise error if model.config.model_type in str(error) else _refusal(model, str(error)) from error
    except Exception as error:  # whatever the model's own code makes of an odd config
        raise _refusal(model, f"three tokens do not go through it ({first_line(error)})") from error


def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"cannot measure this {model.config.model_type} model: {why}")
