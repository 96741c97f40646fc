"""A model, the unit of comparison: an opened checkpoint under a position scheme."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.attention.geometry import Geometry
from headscope.model_spec import ModelSpec, SchemeSpec
from headscope.models.checkpoint import Checkpoint, LoadedModel, open_checkpoint, open_in_memory
from headscope.models.inspection import BaseRotation
from headscope.positions.checkpoint_scheme import trained_under
from headscope.positions.schedule import Schedule
from headscope.positions.scheme_syntax import build_scheme
from headscope.positions.schemes import Base, Scheme


@dataclass(frozen=True, eq=False)
class _FixedScheme:
    """A scheme that resolves to the same schedule for every checkpoint."""

    positions: Schedule

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return self.positions


@dataclass(frozen=True, eq=False)
class Model:
    """An opened checkpoint with a position scheme: the scheme's spec, and the rule that it describes.

    A checkpoint that was trained from its first step under another scheme runs under that scheme by default. Schemes
    are attached and detached (`positions.attach`) and leave the checkpoint unchanged, so models may share it.
    """

    checkpoint: Checkpoint
    scheme_spec: SchemeSpec = field(default_factory=SchemeSpec)
    rule: Scheme = field(default_factory=Base)

    def __post_init__(self) -> None:
        if isinstance(self.rule, Base) and (trained := trained_under(self.checkpoint)) is not None:
            for name, value in zip(("scheme_spec", "rule"), trained, strict=True):
                object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<Model {self.spec}>"

    @property
    def scheme(self) -> str:
        """The position scheme as text, e.g. "yarn:factor=8"."""
        return self.scheme_spec.text

    @cached_property
    def schedule(self) -> Schedule:
        """The positions that the scheme gives this checkpoint; an adapter is read once."""
        return self.rule.schedule(self.checkpoint)

    def with_scheme(self, scheme: str) -> "Model":
        """The same checkpoint under another scheme, e.g. "yarn:factor=8". Raises BadInput if it is invalid."""
        spec = SchemeSpec.parse(scheme)
        return Model(self.checkpoint, spec, build_scheme(spec))

    def with_schedule(self, positions: Schedule, name: str) -> "Model":
        """The same checkpoint under positions in memory, which are stored under the scheme name `name`."""
        return Model(self.checkpoint, SchemeSpec(name, name), _FixedScheme(positions))

    @property
    def spec(self) -> str:
        """The model as text: CHECKPOINT[@SCHEME]."""
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
    model_spec = ModelSpec.parse(spec)
    scheme = build_scheme(model_spec.scheme)
    return Model(open_checkpoint(model_spec, device, dtype, tokenizer), model_spec.scheme, scheme)
