"""A model, the unit of comparison: a loaded checkpoint under a position scheme.

A checkpoint whose config.json has `headscope_positions` was trained from its first step under that scheme, and runs
under it by default: its family's positions would give wrong numbers. The value "adarope" refers to the trained
parameters in the same folder.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.attention.geometry import Geometry
from headscope.base import user_input
from headscope.base.model_identity import ModelIdentity
from headscope.base.model_spec import ModelSpec, SchemeSpec
from headscope.base.public_functions import checked, checked_methods
from headscope.errors import BadInput
from headscope.models import open_contexts
from headscope.models.checkpoint import (
    Checkpoint,
    LoadedModel,
    as_checkpoint,
    open_checkpoint,
    pick_device,
    pick_dtype,
)
from headscope.models.inspection import CheckpointRotation
from headscope.models.loading import load_tokenizer
from headscope.models.padding_check import PaddingCheck
from headscope.positions.schedule import Schedule
from headscope.positions.schemes import Base, Scheme, build_scheme

POSITIONS_KEY = "headscope_positions"
"""The entry of config.json with the scheme that a checkpoint was trained under."""
PRETRAINING_KEY = "headscope_pretraining"
"""The entry of config.json with the variant and the seed of a checkpoint that `headscope pretrain` trained."""
ADAROPE_POSITIONS = "adarope"
ADAPTER_FILE = "adarope.safetensors"
"""The trained parameters in the folder of a checkpoint that was trained with AdaRoPE."""


def training_scheme(checkpoint: LoadedModel) -> tuple[SchemeSpec, Scheme] | None:
    """The scheme that a checkpoint was trained under, or None if it is its family's.

    Raises BadInput for an entry that is not a scheme, ResourceMissing if the trained parameters do not exist.
    """
    text = getattr(checkpoint.module.config, POSITIONS_KEY, None)
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadInput(
            f"checkpoint '{checkpoint.name}': {POSITIONS_KEY} in its config.json is {user_input.quote(text)}. It must "
            "be a position scheme"
        )
    if text == ADAROPE_POSITIONS:
        file = str(Path(checkpoint.module.name_or_path) / ADAPTER_FILE)
        spec = SchemeSpec(f"adarope:adapter={file}", "adarope", {"adapter": file})
    else:
        spec = SchemeSpec.parse(text)
    return spec, build_scheme(spec)


@dataclass(frozen=True, eq=False)
class _FixedScheme:
    """A scheme with the same schedule for every checkpoint."""

    fixed_schedule: Schedule

    def schedule(self, checkpoint: LoadedModel) -> Schedule:
        return self.fixed_schedule


@checked_methods
@dataclass(frozen=True, eq=False)
class Model:
    """A loaded checkpoint with a position scheme and the spec of that scheme.

    A checkpoint that was trained from its first step under another scheme runs under that scheme by default. Schemes
    are attached and detached (`positions.attach`) and leave the checkpoint unchanged, so models may share it.
    """

    checkpoint: Checkpoint
    scheme_spec: SchemeSpec = field(default_factory=SchemeSpec)
    position_scheme: Scheme = field(default_factory=Base)

    def __post_init__(self) -> None:
        if isinstance(self.position_scheme, Base) and (trained := training_scheme(self.checkpoint)) is not None:
            for name, value in zip(("scheme_spec", "position_scheme"), trained, strict=True):
                object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<Model {self.spec}>"

    @property
    def scheme(self) -> str:
        """The position scheme as text, e.g. "yarn:factor=8"."""
        return self.scheme_spec.text

    @cached_property
    def schedule(self) -> Schedule:
        """The checkpoint's positions under the scheme; an adapter is read once."""
        return self.position_scheme.schedule(self.checkpoint)

    def with_scheme(self, scheme: str) -> "Model":
        """The same checkpoint under another scheme, e.g. "yarn:factor=8". Raises BadInput if it is invalid."""
        spec = SchemeSpec.parse(scheme)
        return Model(self.checkpoint, spec, build_scheme(spec))

    def with_schedule(self, schedule: Schedule, name: str) -> "Model":
        """The same checkpoint under a schedule in memory; `name` is the name of its scheme in stored tables."""
        return Model(self.checkpoint, SchemeSpec(name, name), _FixedScheme(schedule))

    @property
    def spec(self) -> str:
        """The model as text: CHECKPOINT[@SCHEME]."""
        return self.name if self.scheme == "base" else f"{self.name}@{self.scheme}"

    @property
    def module(self) -> PreTrainedModel:
        """The model of transformers. Call it, or its `generate`, inside a context such as `hs.capturing`."""
        return self.checkpoint.module

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint."""
        return self.checkpoint.tokenizer

    @property
    def name(self) -> str:
        """The checkpoint as text, as given to `load`."""
        return self.checkpoint.name

    @property
    def bridge(self) -> Any:
        """The TransformerBridge that the model was loaded from, or None."""
        return self.checkpoint.bridge

    @property
    def geometry(self) -> Geometry:
        """Layers, heads, KV groups, head dimension and rotary pairs."""
        return self.checkpoint.geometry

    @property
    def attention_modules(self) -> tuple[nn.Module, ...]:
        """The attention module of each layer that attends."""
        return self.checkpoint.attention_modules

    @property
    def rotation(self) -> CheckpointRotation:
        """How the checkpoint rotates queries and keys by itself."""
        return self.checkpoint.rotation

    @property
    def padding_check(self) -> PaddingCheck:
        """By how much left padding and position_ids change the checkpoint's logits."""
        return self.checkpoint.padding_check

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.checkpoint.device

    @property
    def weights_sha256(self) -> str:
        """The SHA-256 of the present weights rounded to bfloat16, active LoRAs included."""
        return self.checkpoint.weights_sha256

    @property
    def identity(self) -> ModelIdentity:
        """What determines the model's outputs now: weights, configuration, positions, dtype, hooks and contexts.

        A repeated call is cheap if nothing has changed. Raises BadInput if the checkpoint's own rotary frequencies were
        changed after it was loaded.
        """
        return replace(
            self.checkpoint.identity,
            scheme=self.scheme,
            adapter=getattr(self.schedule, "sha256", None),
            positions=_digest_positions(self),
        )

    def in_open_context(self) -> "Model":
        """The model under the scheme that a `with hs.attached(...)` around the caller attaches, if there is one."""
        context = open_contexts.attached_scheme(self.module)
        if context is None or context.model is not self or context.schedule is self.schedule:
            return self
        return Model(self.checkpoint, context.scheme_spec, _FixedScheme(context.schedule))


def _digest_positions(model: Model) -> str:
    """Digest of a model's positions by value: frequencies, attention factors, slopes, and query scales at three
    lengths."""
    schedule, geometry = model.schedule, model.geometry
    visible = torch.tensor([[1, schedule.reference_length, 8 * schedule.reference_length]], device=model.device)
    tensors = [] if schedule.slopes is None else [schedule.slopes]
    for layer in range(geometry.layers):
        tensors += [schedule.theta(layer), torch.tensor(schedule.attention_factor(layer))]
        tensors += [schedule.query_scale(layer, visible)] if schedule.scales_queries else []
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().float().cpu().contiguous()
        digest.update(f"{tuple(values.shape)} ".encode() + values.numpy().tobytes())
    return digest.hexdigest()


@checked
def load(spec: Any, *, device: str = "auto", dtype: str = "auto", tokenizer: Any = None) -> Model:
    """Open a model for measuring.

    `spec` is a string CHECKPOINT[@SCHEME], a transformers model, a TransformerBridge, or a Model. A Model is returned
    unchanged, or under the scheme of the `with hs.attached(...)` that it is in. torch.compile's graphs are not used
    while headscope measures or changes the model.
    CHECKPOINT is a shipped name, a folder, a .gguf file or a hub id; "smollm2-135m@yarn:factor=8" is an example.
    `device` "auto" is CUDA if available, and all GPUs for weights that do not fit one; `dtype` "auto" is float32 on CPU
    and bfloat16 on CUDA. A model in memory is not moved or converted: another device or dtype than its own is refused.
    `tokenizer` is a tokenizer of transformers, or a checkpoint such as a folder that holds one.

    Raises BadInput for an invalid spec, ResourceMissing for a checkpoint that does not exist, UnsupportedModel for an
    architecture that would be measured wrongly.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(str(user_input.check_path(tokenizer, "tokenizer")))
    if not (tokenizer is None or callable(tokenizer)):
        raise BadInput(f"the tokenizer is {user_input.quote(tokenizer)}. Pass a tokenizer of transformers or a folder")
    if not isinstance(spec, str):
        model = spec.in_open_context() if isinstance(spec, Model) else Model(as_checkpoint(spec, tokenizer))
        _check_placement(model.module, device, dtype)
        return model
    model_spec = ModelSpec.parse(spec)
    scheme = build_scheme(model_spec.scheme)
    return Model(open_checkpoint(model_spec, device, dtype, tokenizer), model_spec.scheme, scheme)


def _check_placement(module: PreTrainedModel, device: str, dtype: str) -> None:
    """Raise BadInput if a model in memory is requested on another device or in another dtype than its own."""
    if device != "auto" and torch.empty(0, device=pick_device(device)).device != module.device:
        raise BadInput(f"the model in memory is on {module.device}, not on {device}. Move it with model.to(...)")
    if dtype != "auto" and pick_dtype(dtype, module.device) != module.dtype:
        raise BadInput(f"the model in memory has dtype {module.dtype}, not {dtype}. Convert it with model.to(...)")
