"""A model, the thing that is compared: a checkpoint under a position scheme.

It is written CHECKPOINT[@SCHEME], e.g. "smollm2-135m@yarn:factor=8", and read once, at the door: what goes on from
there is a `Spec`, or a `Model` once the checkpoint is open.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope import user_input
from headscope.attention.geometry import Geometry
from headscope.errors import BadInput
from headscope.models.checkpoint import Checkpoint, LoadedModel, open_checkpoint, open_in_memory
from headscope.models.inspection import BaseRotation
from headscope.positions.checkpoint_scheme import trained_under
from headscope.positions.schedule import Schedule
from headscope.positions.scheme_syntax import parse
from headscope.positions.schemes import SCHEMES, Base, Scheme


@dataclass(frozen=True)
class ModelSpec:
    """What a model is to be: the name of a checkpoint, and a position scheme as it was written and as it was read."""

    checkpoint: str
    scheme: str
    rule: Scheme

    @classmethod
    def read(cls, text: str) -> "ModelSpec":
        """Read "CHECKPOINT[@SCHEME]", split at the last "@" before a scheme's name; the scheme defaults to "base".

        A text that names a folder as it stands is that checkpoint. Raises BadInput for half a spec or a scheme that
        cannot be read.
        """
        if "@" not in text or user_input.is_folder(text):
            checkpoint, scheme = text, "base"
        else:
            named = [each.end() for each in re.finditer("@", text) if _begins_scheme(text[each.end() :])]
            at = named[-1] if named else text.rindex("@") + 1
            checkpoint, scheme = text[: at - 1], text[at:]
        if not checkpoint or not scheme:
            raise BadInput(
                f"bad model spec '{text}': expected CHECKPOINT or CHECKPOINT@SCHEME, e.g. smollm2-135m@yarn:factor=8"
            )
        return cls(checkpoint, scheme, parse(scheme))


def _begins_scheme(text: str) -> bool:
    return text.partition(":")[0] in SCHEMES


@dataclass(frozen=True, eq=False)
class _AtHand:
    """The rule of positions that are there already."""

    positions: Schedule

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return self.positions


@dataclass(frozen=True, eq=False)
class Model:
    """An opened checkpoint with the position scheme it is to run under: the text of it, and the rule that was read.

    Schemes are attached and detached (`positions.attach`); the checkpoint stays as it was opened, and models may share
    it.
    """

    checkpoint: Checkpoint
    scheme: str = "base"
    rule: Scheme = field(default_factory=Base)

    def __post_init__(self) -> None:
        """Under its own positions a checkpoint goes by those that it was trained under."""
        if isinstance(self.rule, Base) and (own := trained_under(self.checkpoint)) is not None:
            for name, value in zip(("scheme", "rule"), own, strict=True):
                object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<Model {self.spec}>"

    @cached_property
    def schedule(self) -> Schedule:
        """What the scheme resolves to for this checkpoint; an adapter is read once."""
        return self.rule.schedule(self.checkpoint)

    def with_scheme(self, scheme: str) -> "Model":
        """The same checkpoint under another scheme, e.g. "yarn:factor=8". Raises BadInput if it cannot be read."""
        return Model(self.checkpoint, scheme, parse(scheme))

    def under(self, positions: Schedule, scheme: str) -> "Model":
        """The same checkpoint under positions that are at hand, which `scheme` only names."""
        return Model(self.checkpoint, scheme, _AtHand(positions))

    @property
    def spec(self) -> str:
        """How it is written: CHECKPOINT[@SCHEME]."""
        return self.name if self.scheme == "base" else f"{self.name}@{self.scheme}"

    @property
    def module(self) -> PreTrainedModel:
        return self.checkpoint.module

    @property
    def tokenizer(self) -> Any:
        return self.checkpoint.tokenizer

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def bridge(self) -> Any:
        return self.checkpoint.bridge

    @property
    def geometry(self) -> Geometry:
        return self.checkpoint.geometry

    @property
    def attention_modules(self) -> tuple[nn.Module, ...]:
        return self.checkpoint.attention_modules

    @property
    def rotation(self) -> BaseRotation:
        return self.checkpoint.rotation

    @property
    def device(self) -> torch.device:
        return self.checkpoint.device

    @property
    def weights_sha256(self) -> str:
        return self.checkpoint.weights_sha256


def load(spec: Any, *, device: str = "auto", dtype: str = "auto", tokenizer: Any = None) -> Model:
    """Open a model for measuring.

    `spec` is a spec string ("smollm2-135m@yarn:factor=8", a folder, a .gguf file, a hub id, each with an optional
    @SCHEME), a transformers model, a TransformerBridge, or an already opened Model (returned as it is).
    `device` "auto" is cuda where there is one, and all GPUs for weights that do not fit one; `dtype` "auto" is float32
    on CPU and bfloat16 on CUDA.

    Raises BadInput for a spec that cannot be read, Missing for a checkpoint that is not there,
    UnsupportedModel for an architecture that would be measured wrongly.
    """
    if isinstance(spec, Model):
        return spec
    if not isinstance(spec, str):
        return Model(open_in_memory(spec, tokenizer))
    read = ModelSpec.read(spec)
    return Model(open_checkpoint(read.checkpoint, device, dtype, tokenizer), read.scheme, read.rule)
