"""How a model's residual stream is put together, seen in a short pass: what adds to it, through which norms, and how
logits come of it.

Nothing is taken from a family's name. Every decoder layer must return the stream that it was given plus multiples of
what some of its parts returned, the heads among them through one projection; norms must divide by one number a token;
logits must be linear in the last hidden states. What is otherwise is refused by name.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.record import AttentionRecord
from headscope.errors import UnsupportedModel
from headscope.forward.backbone import backbone, decoder_layers
from headscope.forward.capture import Layers
from headscope.positions.model import Model

LOUD = 1024.0
"""Size of what a norm is shown, so that its epsilon does not count."""
SHORT = 16
"""Tokens of the pass that shows how the stream is put together."""


class NotASum(Exception):
    """Why a model's logits are not the sum that this file knows."""


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm or LayerNorm: gain * (x - its mean, if `centred`) / scale + shift."""

    module: nn.Module
    gain: Tensor
    shift: Tensor
    centred: bool

    @classmethod
    def seen(cls, module: nn.Module, like: Tensor) -> "Norm":
        """What the module does to states of `like`'s width and kind."""
        width = like.shape[-1]
        signs = torch.ones(1, 1, width, device=like.device, dtype=like.dtype)
        signs[..., width // 2 :] = -1
        zero, plain, raised = (module(x)[0, 0].float() for x in (0 * signs, LOUD * signs, LOUD * (signs + 1)))
        close = torch.allclose(plain, raised, rtol=1e-2, atol=1e-2 * float(plain.abs().max()))
        return cls(module, (plain - zero) * signs[0, 0].float(), zero, close)

    def before(self, towards: Tensor) -> Tensor:
        """Directions [n, D] before the norm for those after it, still to be divided by `scales`."""
        back = towards.to(self.gain.device) * self.gain
        return back - back.mean(-1, keepdim=True) if self.centred else back

    def scales(self, given: Tensor, returned: Tensor) -> Tensor:
        """What each row of `given` [n, D] was divided by, [n]."""
        x, y = given.to(returned.device).float(), returned.float() - self.shift
        linear = self.gain * (x - x.mean(-1, keepdim=True) if self.centred else x)
        scales: Tensor = linear.square().sum(-1) / torch.linalg.vecdot(y, linear)
        if not _same(linear / scales[:, None], y, returned.dtype):
            raise NotASum(f"its {type(self.module).__name__} is neither RMSNorm nor LayerNorm")
        return scales


@dataclass(frozen=True, eq=False)
class Part:
    """A module of a decoder layer whose output is added to the stream, `factor` times."""

    module: nn.Module
    factor: float


@dataclass(frozen=True, eq=False)
class Heads:
    """How the heads of attention layer `index` reach the stream: projected, perhaps normed, `factor` times."""

    index: int
    projection: Tensor
    bias: Tensor | None
    norm: Norm | None
    factor: float


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer: what its heads add to the stream, None in a layer without attention, and its other parts."""

    module: nn.Module
    heads: Heads | None
    others: tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Stream:
    """All that a logit is the sum of: `unembedding` [V, D] less its `mean` [D], `bias` [V] less its own, `factor`
    times, of the final norm of the stream."""

    layers: tuple[Layer, ...]
    final: Norm
    unembedding: Tensor
    mean: Tensor
    bias: Tensor | None
    factor: float


@dataclass(frozen=True, eq=False)
class _Call:
    module: nn.Module
    given: list[Tensor]
    returned: Tensor


def survey(model: Model, layers: Layers, ids: Tensor) -> Stream:
    """See how the model, which is being captured, makes logits of the first of ids [1, n]. Raises UnsupportedModel."""
    try:
        return _survey(model, layers, ids[:, :SHORT])
    except NotASum as why:
        raise UnsupportedModel(f"cannot tell what the heads of {model.name} write: {why}") from why


def _survey(model: Model, layers: Layers, ids: Tensor) -> Stream:
    stack, inner = decoder_layers(model), backbone(model)
    if not stack:
        raise NotASum("its decoder layers are not one list")
    z: dict[int, Tensor] = {}

    def hear(heard: AttentionRecord) -> None:
        z[heard.layer] = heard.z.transpose(0, 1).flatten(1)

    layers.listen(hear)
    with _recorded(inner.modules()) as calls:
        logits = model.module(ids, use_cache=False).logits[0]
    by_module = {call.module: call for call in calls}
    found = []
    for layer in stack:
        if layer not in by_module:
            raise NotASum("its decoder layers do not hand on one stream")
        index = next((n for n, module in enumerate(model.attention) if module in set(layer.modules())), None)
        inside = [call for call in calls if call.module in set(layer.children()) and not _takes(call, call)]
        ends = [c for n, c in enumerate(inside) if not any(_takes(d, c) for d in inside[n + 1 :])]
        ends = [call for call in ends if call.returned.shape == by_module[layer].returned.shape]
        factors = _factors(by_module[layer], ends)
        heads, end = None, None
        if index is not None:
            attention = model.attention[index]
            end, norm = _end_of(next(c for c in inside if attention in set(c.module.modules())), inside)
            if end not in ends:
                raise NotASum(f"the output of the heads of {type(layer).__name__} is not added to its stream")
            heads = _heads(attention, index, z[index], norm, factors[end.module], by_module)
        others = tuple(
            Part(module, factor) for module, factor in factors.items() if end is None or module is not end.module
        )
        found.append(Layer(layer, heads, others))
    hidden, last = by_module[inner].returned, by_module[stack[-1]].returned
    final = next((c for c in calls if _is(c.returned, hidden) and any(_is(given, last) for given in c.given)), None)
    if final is None:
        raise NotASum("no norm stands between its last layer and its logits")
    norm = Norm.seen(final.module, hidden)
    norm.scales(last[0], hidden[0])
    return _unembedded(model, found, norm, hidden[0], logits)


def _end_of(call: _Call, calls: Sequence[_Call]) -> tuple[_Call, Norm | None]:
    """The part whose output is what the heads add to the stream: the attention, or a norm after it."""
    after = [later for later in calls if _takes(later, call)]
    if not after:
        return call, None
    norm = Norm.seen(after[0].module, after[0].returned)
    norm.scales(call.returned[0], after[0].returned[0])
    return after[0], norm


def _factors(whole: _Call, ends: Sequence[_Call]) -> dict[nn.Module, float]:
    """How many times each of the outputs, which no later part takes as it is, was added to the stream."""
    if not ends:
        raise NotASum(f"no part of {type(whole.module).__name__} adds to its stream")
    outputs = torch.stack([call.returned.double().flatten() for call in ends], 1).cpu()
    stream, returned = (t.double().flatten().cpu() for t in (whole.given[0], whole.returned))
    factors = torch.linalg.lstsq(outputs, (returned - stream)[:, None]).solution[:, 0]
    factors = torch.where((factors - 1).abs() < _bound(whole.returned.dtype), 1.0, factors)
    if not _same(stream + outputs @ factors, returned, whole.returned.dtype):
        raise NotASum(f"{type(whole.module).__name__} returns more than its stream and what its parts add")
    return {call.module: float(factor) for call, factor in zip(ends, factors, strict=True)}


def _heads(
    attention: nn.Module, index: int, z: Tensor, norm: Norm | None, factor: float, by_module: dict[nn.Module, _Call]
) -> Heads:
    """The projection whose input is the heads' output as it is and whose output is the attention's."""
    returned = by_module[attention].returned if attention in by_module else None
    for module in attention.modules():
        call, matrix = by_module.get(module), _matrix(module)
        if call is None or matrix is None or not call.given or call.given[0][0].shape != z.shape:
            continue
        if torch.equal(call.given[0][0], z) and (returned is None or _same(call.returned, returned, z.dtype)):
            bias = getattr(module, "bias", None)
            own = z.float() @ matrix.float().T + (0 if bias is None else bias.float())
            if not _same(own, call.returned[0].float(), z.dtype):  # as where a LoRA adds to it
                raise NotASum(f"its {type(module).__name__} projects heads by more than its weight")
            return Heads(index, matrix, bias, norm, factor)
    raise NotASum("its attention changes what heads put out before, or after, it is projected")


def _unembedded(model: Model, layers: list[Layer], norm: Norm, hidden: Tensor, logits: Tensor) -> Stream:
    """The whole stream; `logits` [n, V] must be what comes of `hidden` [n, D]."""
    head = model.module.get_output_embeddings()
    weight, bias = head.weight.detach(), getattr(head, "bias", None)
    hidden, logits = hidden.to(weight.device), logits.to(weight.device)
    mean = weight.mean(0, dtype=torch.float32)
    ours = hidden.float() @ weight.float().T - (hidden.float() @ mean)[:, None]
    if bias is not None:
        ours += bias.float() - bias.float().mean()
    theirs = logits.float() - logits.float().mean(-1, keepdim=True)
    factor = float((ours * theirs).sum() / ours.square().sum())
    if not _same(factor * ours, theirs, logits.dtype):
        raise NotASum("its logits are not linear in its last hidden states, as where they are soft-capped")
    factor = 1.0 if abs(factor - 1) < _bound(logits.dtype) else factor
    return Stream(tuple(layers), norm, weight, mean, bias, factor)


def _matrix(module: nn.Module) -> Tensor | None:
    """The weight [out, in] of a linear module."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    return weight.detach().T if type(module).__name__ == "Conv1D" else weight.detach()


def _same(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether they agree as far as numbers of that kind can."""
    return float((ours - theirs).abs().max()) <= _bound(dtype) * float(theirs.abs().max())


def _bound(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 3e-2


def _takes(later: _Call, call: _Call) -> bool:
    """Whether a call was given what another returned, as it is."""
    return any(_is(given, call.returned) for given in later.given)


def _is(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


@contextmanager
def _recorded(modules: Iterable[nn.Module]) -> Iterator[list[_Call]]:
    """Every call of these modules, in the order in which they return. The tensors are kept, so that places stay."""
    calls: list[_Call] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() == 3]
        if (state := state_of(output)) is not None:
            calls.append(_Call(module, given, state))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield calls


def state_of(output: Any) -> Tensor | None:
    """The states [1, n, D] in what a module returned, alone or first of several."""
    output = getattr(output, "last_hidden_state", output)
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) and first.dim() == 3 else None
