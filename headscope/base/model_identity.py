"""The identity of a model: everything that determines what a forward pass computes, as plain data.

`Model.identity` computes it, run.json stores it under `identity`, and `ModelIdentity.compare` is the only
comparison of two models in headscope. This module needs no torch. A run may record less: a comparison
lists the fields that one of the two models lacks as unknown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from headscope.base.model_spec import normalized_scheme
from headscope.base.user_input import quote
from headscope.errors import BadInput

AcceptedWeights = Literal["same", "any"]
"""Values of every option `weights`: accept heads and scores of the same weights only, or of any weights."""
WEIGHTS_OPTION = (
    "same: refuse heads and scores that were measured on other weights; any: use them, and say so in the run"
)
"""Help of every option `weights`."""
INT8 = "bitsandbytes 8-bit"
"""The quantization LLM.int8. It selects outlier activations in every pass, so results depend on the whole batch."""
MAX_DIFFERENCES = 3
"""Most entries of a configuration that a comparison names."""
FIELDS = {
    "dtype": "dtype",
    "quantization": "quantization",
    "scheme": "position scheme",
    "adapter": "adapter",
    "configuration": "configuration",
    "constants": "constants of modules",
    "geometry": "geometry",
    "positions": "rotary frequencies or temperature",
    "hooks": "hooks",
    "contexts": "headscope contexts",
}
"""Fields of an identity beside its weights, with their names in messages."""
MAPPINGS = ("configuration", "constants", "geometry")
UNUSED_GEOMETRY = ("native_context", "original_context")
"""Entries of a geometry that change no forward pass."""
Agreement = Literal["equal", "equal after rounding to bfloat16", "equal after rounding to float16", "different", ""]
"""How the weights of two models agree; "" if that is unknown."""


@dataclass(frozen=True)
class WeightDigests:
    """SHA-256 of all weights by name, active LoRAs included; "" where a run, head set or adapter does not record it.

    `exact` is that of the values, equal for every dtype that holds them. `bfloat16` and `float16` are those of the
    rounded values: they recognise a copy of a checkpoint in another dtype. `bfloat16` is the `weights_sha256` of runs.
    """

    bfloat16: str = ""
    float16: str = ""
    exact: str = ""

    def __bool__(self) -> bool:
        """Whether any digest is known."""
        return bool(self.to_dict())

    @property
    def label(self) -> str:
        """The digest that names the weights in messages: that after rounding to bfloat16, or the first one known."""
        return next(iter(self.to_dict().values()), "")

    def compare(self, other: "WeightDigests") -> Agreement:
        """How these weights agree with others."""
        own, others = self.to_dict(), other.to_dict()
        is_equal = {name: own[name] == others[name] for name in own.keys() & others.keys()}
        if is_equal.get("exact"):
            # Equal values have equal rounded values, so another rounded digest is one of other weights.
            return "equal" if all(is_equal.values()) else "different"
        if is_equal.get("bfloat16"):
            return "equal after rounding to bfloat16"
        if is_equal.get("float16"):
            return "equal after rounding to float16"
        return "different" if is_equal else ""

    def matches(self, other: "WeightDigests") -> bool:
        """Whether the weights are equal, at least after rounding, or unknown."""
        return self.compare(other) != "different"

    def shared_with(self, other: "WeightDigests") -> "WeightDigests":
        """The digests that both have; those of one if the other has none."""
        if not (self and other):
            return self or other
        return WeightDigests(**dict(self.to_dict().items() & other.to_dict().items()))

    def to_dict(self) -> dict[str, str]:
        """The known digests by name."""
        return {name: digest for name, digest in asdict(self).items() if digest}

    @classmethod
    def from_dict(cls, digests: Any) -> "WeightDigests":
        """The digests in plain data; a text is the digest after rounding to bfloat16, as older files have it."""
        if not isinstance(digests, Mapping):
            return cls(str(digests or ""))
        return cls(**{name: str(digests.get(name) or "") for name in ("bfloat16", "float16", "exact")})

    @classmethod
    def parse(cls, digests: Any, weights_sha256: Any = None) -> "WeightDigests":
        """The digests of `from_record` in a file that a user may have written.

        Raises ValueError for an unknown kind, which would count for nothing, and for what is no SHA-256.
        """
        kinds = digests if isinstance(digests, Mapping) else {"bfloat16": digests}
        for kind, digest in (*kinds.items(), ("bfloat16", weights_sha256)):
            if kind not in asdict(NO_DIGESTS):
                raise ValueError(f"unknown digest {quote(kind)}. Use: {', '.join(asdict(NO_DIGESTS))}")
            if digest and not re.fullmatch("[0-9a-f]{64}", str(digest)):
                raise ValueError(f"digest {quote(digest)} is no SHA-256 of 64 hexadecimal digits. Correct or remove it")
        return cls.from_record(digests, weights_sha256)

    def to_record(self) -> dict[str, Any]:
        """The entries of a file that `from_record` reads."""
        return {"weights_sha256": self.bfloat16, "weights": self.to_dict()}

    @classmethod
    def from_record(cls, digests: Any, weights_sha256: Any) -> "WeightDigests":
        """The digests that a file records twice: `weights_sha256`, which older ones have alone, wins."""
        recorded = cls.from_dict(digests)
        return replace(recorded, bfloat16=str(weights_sha256 or recorded.bfloat16))


NO_DIGESTS = WeightDigests()
"""The digests of unknown weights."""


def refuse_other_weights(
    source: str, digests: WeightDigests, identity: "ModelIdentity", model: str, weights: AcceptedWeights
) -> bool:
    """Raise BadInput for heads or scores that were measured on other weights, unless `weights` is "any".

    `source` and `model` name them in messages. Returns whether the weights are other ones. Those without digests, and
    those of a copy in another dtype, which is equal after rounding, are accepted.
    """
    if digests.matches(identity.weights):
        return False
    if weights != "any":
        raise BadInput(
            f"{source} belongs to other weights (sha256 {digests.label[:12]}) than model '{model}' "
            f"({identity.weights.label[:12]}). Measure it on this model, or use it anyway with --weights any "
            "(weights='any' in Python)"
        )
    return True


def refuse_other_name(source: str, name: str, model: str, names: Sequence[str], weights: AcceptedWeights) -> bool:
    """Raise BadInput for scores that name another model than `model`, which has these `names`, unless allowed.

    Only the last part of a path counts, since a folder may have been moved. `weights` "any" allows it. Returns whether
    the name is another one.
    """
    if not name or _last_part(name) in map(_last_part, (model, *names)):
        return False
    if weights != "any":
        raise BadInput(
            f"{source} belongs to model '{name}', not to '{model}' ({names[0]}). Use the scores of this model, or use "
            "them anyway with --weights any (weights='any' in Python)"
        )
    return True


def _last_part(name: str) -> str:
    return PurePath(name.partition("@")[0]).name.casefold()


@dataclass(frozen=True)
class Comparison:
    """What differs between two models, one phrase per difference, and which fields one of them does not record."""

    differences: tuple[str, ...]
    unknown: tuple[str, ...]
    weights: Agreement

    @property
    def has_equal_weights(self) -> bool:
        """Whether the weights are equal, at least after rounding."""
        return self.weights.startswith("equal")


@dataclass(frozen=True)
class ModelIdentity:
    """Everything that determines what a model computes; None where a run does not record it.

    `positions` is the digest of the resolved frequencies, attention factors, query scales and slopes of every layer
    under `scheme`; `adapter` that of an AdaRoPE adapter. `configuration` is the resolved config without entries that
    change no forward pass. `constants` are the numbers that modules keep, such as the softmax temperature and epsilons,
    by attribute: one number, or one per module. `geometry` holds heads and windows by layer. `hooks` names the hooks
    and replaced forwards that are not headscope's, `contexts` the headscope contexts that the model was in.
    """

    weights: WeightDigests
    dtype: str | None = None
    quantization: str | None = None
    scheme: str | None = None
    adapter: str | None = None
    positions: str | None = None
    configuration: Mapping[str, Any] | None = None
    constants: Mapping[str, Any] | None = None
    geometry: Mapping[str, Any] | None = None
    hooks: tuple[str, ...] | None = None
    contexts: tuple[str, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The entry `identity` of a model in run.json, without the fields that the model's entry already has."""
        lists = {name: [*(getattr(self, name) or ())] for name in ("hooks", "contexts")}
        values = {name: getattr(self, name) for name in ("quantization", "positions", "configuration", "constants")}
        return {"weights": self.weights.to_dict(), **values, **lists}

    @classmethod
    def from_manifest(cls, entry: Mapping[str, Any]) -> "ModelIdentity":
        """The identity of a model's entry in run.json."""
        identity = entry.get("identity") or {}
        return cls(
            WeightDigests.from_record(identity.get("weights"), entry.get("weights_sha256")),
            entry.get("dtype"),
            identity.get("quantization"),
            None if entry.get("scheme") is None else normalized_scheme(entry["scheme"]),
            entry.get("adapter_sha256"),
            identity.get("positions"),
            identity.get("configuration"),
            identity.get("constants"),
            entry.get("geometry"),
            None if "hooks" not in identity else tuple(identity["hooks"]),
            None if "contexts" not in identity else tuple(identity["contexts"]),
        )

    def compare(self, other: "ModelIdentity") -> Comparison:
        """What differs between this model and another one, and what is unknown."""
        agreement = self.weights.compare(other.weights)
        differences, unknown = [], []
        if not (self.weights.exact and other.weights.exact):
            unknown.append("weights beyond bfloat16" if agreement else "weights")
        if agreement == "different":
            differences.append("weights")
        elif agreement == "equal after rounding to float16" or (agreement != "equal" and not unknown):
            differences.append(f"weights ({agreement})")
        for name, noun in FIELDS.items():
            own, others = getattr(self, name), getattr(other, name)
            if None in (own, others) and name not in ("adapter", *MAPPINGS):
                unknown += [noun] if own != others else []
            elif name not in MAPPINGS:
                differences += _difference(name, noun, own, others)
            elif own is not None and others is not None:
                differences += _differing_entries(noun, own, others)
            else:
                unknown.append(noun)
        if self.hooks and self.hooks == other.hooks:
            unknown.append("tensors that their hooks use")
        return Comparison(tuple(differences), tuple(unknown), agreement)


def _difference(name: str, noun: str, own: Any, others: Any) -> list[str]:
    """One phrase if two values differ; digests are not shown."""
    if own == others:
        return []
    return [noun if name in ("adapter", "positions") else f"{noun} ({_format(own)} against {_format(others)})"]


def _differing_entries(noun: str, own: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """One phrase for the entries that differ between two nested mappings; none if they are equal.

    Versions of headscope store different entries of a geometry, so only common entries are compared there.
    """
    first, second = dict(_flatten(own)), dict(_flatten(others))
    names = [*{**first, **second}]
    if noun == FIELDS["geometry"]:
        names = [name for name in names if name in first and name in second and name not in UNUSED_GEOMETRY]
    names = [name for name in names if first.get(name) != second.get(name)]
    if not names:
        return []
    phrases = [f"{name} {_format(first.get(name))} against {_format(second.get(name))}" for name in names]
    more = f" and {len(names) - MAX_DIFFERENCES} more" if len(names) > MAX_DIFFERENCES else ""
    return [f"{noun} ({', '.join(phrases[:MAX_DIFFERENCES])}{more})"]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested mappings by dotted key. Values are compared as JSON has them."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", [*value] if isinstance(value, tuple) else value


def _format(value: Any) -> str:
    if value is None or value == () or value == "":
        return "none"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
