"""Position schemes (RoPE scaling methods and others): frozen options, built from a spec, that make a Schedule.

Frequencies come from transformers (`ROPE_INIT_FUNCTIONS`) for every method that it has. In a checkpoint with separate
frequencies for its sliding-window layers, a scheme changes only the full-attention layers: a window does not grow with
the context.

Effect of a scheme on the temperature: unscaled, yarn, linear, ntk, abf and llama3 replace the checkpoint's RoPE
scaling, including its factors on cos and sin and on the softmax scale; of these only yarn has a temperature of its own.
logn multiplies the checkpoint's temperature, prope and nope keep it, alibi keeps the factor on the softmax scale.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope.base import user_input
from headscope.base.model_spec import SchemeSpec
from headscope.errors import BadInput, ResourceMissing, did_you_mean
from headscope.models.checkpoint import LoadedModel
from headscope.positions.adarope import AdaRoPE, find_adapter_file
from headscope.positions.keymap import load_with_key_map
from headscope.positions.rope_scaling import scaled_schedule
from headscope.positions.schedule import FixedSchedule, Schedule, require_rotation, unsupported_scheme_error

MAX_INTEGER = 2**31
"""Largest whole number in a spec."""
MAX_FACTOR, MAX_BASE = 1e6, 1e15
"""Largest factor and base of the rotary frequencies in a spec; beyond them frequencies vanish in float32."""


class Scheme(Protocol):
    """A position scheme."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        """The positions of `checkpoint` under the scheme. Raises UnsupportedModel if it cannot be applied."""


@dataclass(frozen=True)
class Base:
    """The checkpoint's own positions, with the RoPE scaling of its config, such as YaRN."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return FixedSchedule.of_checkpoint(checkpoint)


@dataclass(frozen=True)
class Unscaled:
    """RoPE of the checkpoint's base, without the RoPE scaling of its config."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        require_rotation(checkpoint, "unscaled")
        return scaled_schedule(checkpoint, "linear", factor=1.0)


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies interpolated by wavelength, rotated logits times `attention_factor`².

    The default of `attention_factor` is 0.1 ln(`factor`) + 1; with 1, only the frequencies change. On a
    checkpoint that already uses YaRN, the settings of its family stay (beta_fast, beta_slow, truncate, mscale,
    mscale_all_dim), so its own factor changes nothing, unless its config states an attention factor.
    """

    factor: float
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require_at_least(1, MAX_FACTOR, factor=self.factor)
        _require_above(0, MAX_FACTOR, attention_factor=self.attention_factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return scaled_schedule(checkpoint, "yarn", factor=self.factor, attention_factor=self.attention_factor)


@dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _require_at_least(1, MAX_FACTOR, factor=self.factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return scaled_schedule(checkpoint, "linear", factor=self.factor)


@dataclass(frozen=True)
class NTK:
    """NTK-aware interpolation: the base is multiplied by factor^(r / (r - 2)) for r rotary dimensions."""

    factor: float

    def __post_init__(self) -> None:
        _require_at_least(1, MAX_FACTOR, factor=self.factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        require_rotation(checkpoint, "ntk")
        return scaled_schedule(checkpoint, "linear", factor=1.0, ntk_factor=self.factor)


@dataclass(frozen=True)
class ABF:
    """Adjusted base frequency (Xiong et al. 2023): the checkpoint's base replaced by `theta`."""

    theta: float

    def __post_init__(self) -> None:
        _require_above(1, MAX_BASE, theta=self.theta)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        require_rotation(checkpoint, "abf")
        return scaled_schedule(checkpoint, "linear", factor=1.0, rope_theta=self.theta)


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scheme: low frequencies divided by `factor`, high ones kept, interpolated in between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _require_at_least(1, MAX_FACTOR, factor=self.factor)
        _require_above(0, MAX_FACTOR, low_freq_factor=self.low_freq_factor)
        _require_above(self.low_freq_factor, MAX_FACTOR, high_freq_factor=self.high_freq_factor)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return scaled_schedule(
            checkpoint,
            "llama3",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
        )


@dataclass(frozen=True)
class LogN:
    """Log-n scaling: with n > `length` visible keys the query is multiplied by ln(n) / ln(length).

    The default of `length` is the native context.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        _require_at_least(2, MAX_INTEGER, length=self.length)

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        length = self.length or checkpoint.geometry.native_context
        if not length:
            reason, advice = "its config has no context length", "Give logn:length=TOKENS"
            raise unsupported_scheme_error(checkpoint, "logn", reason, advice)

        def query_scale(layer: int, visible: Tensor) -> Tensor:
            return (visible.float().log() / math.log(length)).clamp(min=1.0)[:, None]

        return FixedSchedule.of_checkpoint(checkpoint, query_scale=query_scale, reference_length=length)


@dataclass(frozen=True)
class PRoPE:
    """Partial RoPE (Barbero et al. 2025): the highest share `keep` of the frequencies kept, the rest set to 0."""

    keep: float = 0.75

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise BadInput(f"keep={self.keep:g} is not a share of the rotary pairs. Use a number between 0 and 1")

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        if self.keep and (limit := checkpoint.rotation.frequency_change_length) is not None:
            reason = f"its own frequencies change beyond {limit} tokens"
            raise unsupported_scheme_error(checkpoint, "prope", reason)
        return _keeping_highest_frequencies(checkpoint, "prope", self.keep)


@dataclass(frozen=True)
class NoPE:
    """No rotation at all: every frequency is 0."""

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return _keeping_highest_frequencies(checkpoint, "nope", 0.0)


@dataclass(frozen=True)
class ALiBi:
    """No rotation; the logits of a head fall by its slope for every token of distance (Press et al. 2022).

    The slopes are the published ones: 2^(-8/H), 2^(-16/H), ... for H heads if H is a power of two; for another H all
    slopes of the next lower power of two, then every other slope of the next higher one.
    """

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        unrotated = _keeping_highest_frequencies(checkpoint, "alibi", 0.0)
        geometry = checkpoint.geometry
        if any(2 * pairs < dim for pairs, dim in zip(geometry.layer_pairs, geometry.layer_head_dims, strict=True)):
            raise unsupported_scheme_error(checkpoint, "alibi", "it rotates only a part of each head")
        if len(set(geometry.layer_heads)) > 1:
            raise unsupported_scheme_error(checkpoint, "alibi", "its layers differ in their number of heads")
        thetas = tuple(unrotated.theta(layer) for layer in range(geometry.layers))
        return FixedSchedule(checkpoint, thetas, (1.0,) * geometry.layers, slopes=alibi_slopes(geometry.heads))


def _keeping_highest_frequencies(checkpoint: LoadedModel, scheme: str, share: float) -> FixedSchedule:
    """The checkpoint's schedule with the highest `share` of the frequencies kept and the rest set to 0."""
    require_rotation(checkpoint, scheme)
    own = FixedSchedule.of_checkpoint(checkpoint)

    def keep(theta: Tensor) -> Tensor:
        pairs = theta.shape[1]
        return theta * (torch.arange(pairs) < round(share * pairs))

    masked = {id(theta): keep(theta) for theta in own.thetas}  # layers go on sharing tensors
    return FixedSchedule(checkpoint, tuple(masked[id(theta)] for theta in own.thetas), own.attention_factors)


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [H], float32."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    further_slopes = [2 ** (-4 * (n + 1) / power) for n in range(0, 2 * power, 2)]
    return torch.tensor(slopes + further_slopes[: heads - power])


@dataclass(frozen=True)
class AdaRoPEScheme:
    """AdaRoPE: trained frequencies per KV group and temperatures per head, from the adapter file `adapter`.

    `length` is the n in λ(n): visible (the keys that the query sees) or, as in the paper, sequence (the whole length).
    `weights=any` accepts other weights than those of the training. `keys` is the key map of a checkpoint that was
    itself trained with AdaRoPE, whose path is then `adapter`.
    """

    adapter: str
    length: str = "visible"
    weights: str = "same"
    keys: str | None = None

    def __post_init__(self) -> None:
        if self.length not in ("visible", "sequence"):
            raise BadInput(f"length={self.length} is unknown. Use length=visible or length=sequence")
        if self.weights not in ("same", "any"):
            raise BadInput(f"weights={self.weights} is unknown. Use weights=same or weights=any")
        # Checked with the spec, not after other models have been measured.
        if self.keys is None:
            find_adapter_file(self.adapter)
        elif not user_input.expand_path(self.adapter, "checkpoint").exists():
            raise ResourceMissing(f"no checkpoint at '{self.adapter}'. Check adapter=PATH")
        elif not user_input.expand_path(self.keys, "key map").exists():
            raise ResourceMissing(f"no key map at '{self.keys}'. Check keys=PATH")

    @property
    def uses_sequence_length(self) -> bool:
        return self.length == "sequence"

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        if self.keys is not None:
            adarope = load_with_key_map(self.adapter, self.keys, checkpoint)
        else:
            adarope = AdaRoPE.load(self.adapter, checkpoint, any_weights=self.weights == "any")
        adarope.uses_sequence_length = self.uses_sequence_length
        return adarope


SCHEMES: Mapping[str, type[Any]] = MappingProxyType(
    {
        "base": Base,
        "unscaled": Unscaled,
        "yarn": Yarn,
        "linear": Linear,
        "ntk": NTK,
        "abf": ABF,
        "llama3": Llama3,
        "logn": LogN,
        "prope": PRoPE,
        "nope": NoPE,
        "alibi": ALiBi,
        "adarope": AdaRoPEScheme,
    }
)


def parse_scheme(text: str) -> Scheme:
    """Build the scheme of a spec "NAME[:key=value,...]". Raises BadInput if the spec is invalid."""
    return build_scheme(SchemeSpec.parse(text))


def build_scheme(spec: SchemeSpec) -> Scheme:
    """Build the scheme of a parsed spec. Raises BadInput for an unknown or missing key, or an invalid value."""
    declared = {field.name: field for field in fields(SCHEMES[spec.name])}
    for key in spec.options:
        if key not in declared:
            keys = f"It takes {', '.join(declared)}" if declared else "It takes no keys"
            raise BadInput(f"scheme '{spec.name}' has no key '{key}'{did_you_mean(key, declared)}. {keys}")
    values = {
        key: _parse_value(value, str(declared[key].type), f"{key} in scheme '{spec.text}'")
        for key, value in spec.options.items()
    }
    for key, field in declared.items():
        if field.default is MISSING and key not in values:
            example = "PATH" if field.type is str else 8
            raise BadInput(f"scheme '{spec.name}' needs {key}=..., e.g. {spec.name}:{key}={example}")
    try:
        scheme: Scheme = SCHEMES[spec.name](**values)
    except BadInput as error:
        raise BadInput(f"invalid scheme '{spec.text}': {error}") from error
    return scheme


def _parse_value(text: str, field_type: str, description: str) -> Any:
    if "str" in field_type:
        return text
    try:
        number = int(text) if "int" in field_type else float(text)
    except ValueError as error:
        kind, example = ("an integer", "digits, such as 4096") if "int" in field_type else ("a number", "one such as 8")
        raise BadInput(f"{user_input.quote(text)} is not {kind}: {description}. Use {example}") from error
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise BadInput(f"{user_input.quote(number)} is too large: {description}. Use at most {MAX_INTEGER:,}")
    return number


def _require_at_least(low: float, high: float, **options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not low <= value <= high:
            raise BadInput(f"{name}={value:g} is out of range. Use a number of at least {low:g} and at most {high:g}")


def _require_above(low: float, high: float, **options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not low < value <= high:
            raise BadInput(f"{name}={value:g} is out of range. Use a number above {low:g} and at most {high:g}")
