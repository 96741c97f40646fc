"""Position schemes: frozen rules that give every layer its rotation frequencies and logit scale.

The frequency schedules are transformers' own (`ROPE_INIT_FUNCTIONS`) wherever it has them. Where a
checkpoint keeps separate frequencies for its sliding-window layers, a scheme changes the full-attention layers
only: a window does not grow with the context.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope import user_input
from headscope.errors import BadInput, Missing
from headscope.models.checkpoint import LoadedModel
from headscope.positions.adarope import AdaRoPE, adapter_file
from headscope.positions.keymap import mapped
from headscope.positions.rope_scaling import rescheduled
from headscope.positions.schedule import Fixed, Schedule, refusal, refuse_without_rotation


class Scheme(Protocol):
    """A position scheme; `schedule` resolves it for one checkpoint."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule: ...


@dataclass(frozen=True)
class Base:
    """The checkpoint's own positions."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return Fixed.own(checkpoint)


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies interpolated by wavelength, logits sharpened by m^2.

    `attention_factor` is m, by default 0.1 ln(factor) + 1; `attention_factor=1` is "YaRN without scaling".
    """

    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor)
        _above(0, attention_factor=self.attention_factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return rescheduled(checkpoint, "yarn", factor=self.factor, attention_factor=self.attention_factor)


@dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return rescheduled(checkpoint, "linear", factor=self.factor)


@dataclass(frozen=True)
class NTK:
    """NTK-aware interpolation: the base grows by factor^(r / (r - 2)), r rotary dimensions."""

    factor: float

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        refuse_without_rotation(checkpoint, "ntk")
        dims = 2 * checkpoint.geometry.pairs
        if dims == 2:
            raise refusal(checkpoint, "ntk", "its one rotary pair turns alike under every base")
        return rescheduled(checkpoint, "linear", factor=1.0, base_factor=self.factor ** (dims / (dims - 2)))


@dataclass(frozen=True)
class ABF:
    """Adjusted base frequency (Xiong et al. 2023): the checkpoint's base replaced by `theta`."""

    theta: float

    def __post_init__(self) -> None:
        _above(1, theta=self.theta)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return rescheduled(checkpoint, "linear", factor=1.0, rope_theta=self.theta)


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scheme: long wavelengths divided by `factor`, short ones kept, smooth in between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _at_least(1, factor=self.factor)
        _above(0, low_freq_factor=self.low_freq_factor)
        _above(self.low_freq_factor, high_freq_factor=self.high_freq_factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return rescheduled(
            checkpoint,
            "llama3",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
        )


@dataclass(frozen=True)
class LogN:
    """The checkpoint's rotation; beyond `length` visible keys the query grows by ln(n) / ln(length)."""

    length: int | None = None

    def __post_init__(self) -> None:
        _at_least(2, length=self.length)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        length = self.length or checkpoint.geometry.native_context

        def scale(layer: int, visible: Tensor) -> Tensor:
            return (visible.float().log() / math.log(length)).clamp(min=1.0)[:, None]

        return Fixed.own(checkpoint, scale=scale, reference_length=length)


@dataclass(frozen=True)
class PRoPE:
    """Partial RoPE (Barbero et al. 2025): the highest `keep` of the frequencies kept, the rest set to 0."""

    keep: float = 0.75

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise BadInput(f"keep={self.keep:g}: expected a share of the rotary pairs between 0 and 1")

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        refuse_without_rotation(checkpoint, "prope")
        if self.keep and (until := checkpoint.rotation.frequency_change_length) is not None:
            raise refusal(checkpoint, "prope", f"its own frequencies are others in a text of more than {until} tokens")
        own = Fixed.own(checkpoint)
        kept = torch.arange(checkpoint.geometry.pairs) < round(self.keep * checkpoint.geometry.pairs)
        shared = {id(theta): theta * kept for theta in own.thetas}
        return Fixed(checkpoint, tuple(shared[id(theta)] for theta in own.thetas), own.factors)


@dataclass(frozen=True)
class NoPE:
    """No rotation at all: every frequency is 0."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return PRoPE(keep=0.0).schedule(checkpoint)


@dataclass(frozen=True)
class ALiBi:
    """No rotation; head h's logits fall by its slope for every token of distance (Press et al. 2022).

    Slopes are the published ones: 2^(-8/H), 2^(-16/H), ... for H heads, H a power of two; for another H those of the
    power below, and of the power above every other one.
    """

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        still = NoPE().schedule(checkpoint)
        geometry = checkpoint.geometry
        if 2 * geometry.pairs < geometry.head_dim:
            raise refusal(checkpoint, "alibi", "it turns only a part of each head; use one that turns whole heads")
        thetas = tuple(still.theta(layer) for layer in range(geometry.layers))
        return Fixed(checkpoint, thetas, (1.0,) * geometry.layers, slopes=published_slopes(geometry.heads))


def published_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [H], float32."""
    below = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (n + 1) / below) for n in range(below)]
    between = [2 ** (-4 * (n + 1) / below) for n in range(0, 2 * below, 2)]
    return torch.tensor(first + between[: heads - below])


@dataclass(frozen=True)
class Adapted:
    """AdaRoPE: learned frequencies per KV group and temperatures per head, from an adapter file.

    lambda(n) takes n = the keys that each query sees (`length=visible`), or, as the paper writes it, the length of the
    whole sequence for every query (`length=sequence`). `weights=any` puts it on weights it was not learned on.
    With `keys`, `adapter` is a checkpoint trained with AdaRoPE inside, read by that key map (`positions.keymap`).
    """

    adapter: str
    length: str = "visible"
    weights: str = "same"
    keys: str | None = None

    def __post_init__(self) -> None:
        if self.length not in ("visible", "sequence"):
            raise BadInput(f"length={self.length}: expected visible or sequence")
        if self.weights not in ("same", "any"):
            raise BadInput(f"weights={self.weights}: expected same or any")
        # Told when the spec is read, not after other models have been measured.
        if self.keys is None:
            adapter_file(self.adapter)
        elif not user_input.expand_path(self.adapter, "checkpoint").exists():
            raise Missing(f"no checkpoint at '{self.adapter}': check adapter=PATH")
        elif not user_input.expand_path(self.keys, "key map").exists():
            raise Missing(f"no key map at '{self.keys}': check keys=PATH")

    @property
    def by_sequence(self) -> bool:
        return self.length == "sequence"

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        if self.keys is not None:
            learned = mapped(self.adapter, self.keys, checkpoint)
        else:
            learned = AdaRoPE.load(self.adapter, checkpoint, any_weights=self.weights == "any")
        learned.by_sequence = self.by_sequence
        return learned


SCHEMES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "base": Base,
        "yarn": Yarn,
        "linear": Linear,
        "ntk": NTK,
        "abf": ABF,
        "llama3": Llama3,
        "logn": LogN,
        "prope": PRoPE,
        "nope": NoPE,
        "alibi": ALiBi,
        "adarope": Adapted,
    }
)


def _at_least(low: float, **named: float | None) -> None:
    for name, value in named.items():
        if value is not None and not (value >= low and math.isfinite(value)):
            raise BadInput(f"{name}={value:g}: expected a number of at least {low:g}")


def _above(low: float, **named: float | None) -> None:
    for name, value in named.items():
        if value is not None and not (value > low and math.isfinite(value)):
            raise BadInput(f"{name}={value:g}: expected a number above {low:g}")
