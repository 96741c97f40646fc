"""Open a checkpoint and read its geometry.

A checkpoint is named by an alias, a folder, a .gguf file or a hub id, or given as an in-memory
transformers model or a TransformerBridge. Its geometry is not read from config fields that differ by
family but seen in a two-token forward pass through the seam: which modules attend, with what shapes,
which of them rotate and in which layout. What would be measured wrongly is refused by name. This file
knows position schemes only as the text after the "@" of a spec.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope import checkpoints, rotary
from headscope.errors import BadInput
from headscope.geometry import Geometry


@dataclass(eq=False)
class Model:
    """An opened checkpoint with the spec text of the position scheme it is to be measured under.

    `module` is the transformers model, `attention` its attention modules by layer, `bridge` the TransformerBridge
    that wraps it, if it came as one. Schemes are attached and detached; the module itself stays as loaded.
    """

    module: PreTrainedModel
    tokenizer: Any
    checkpoint: str
    scheme: str = "base"
    bridge: Any = None
    geometry: Geometry = field(init=False)
    attention: tuple[nn.Module, ...] = field(init=False)
    rotation: rotary.BaseRotation = field(init=False)

    def __post_init__(self) -> None:
        checkpoints.refuse_by_config(self.module.config, self.checkpoint)
        with delegated(self.bridge):
            survey = rotary.survey(self.module)
        self.attention = survey.modules
        self.rotation = survey.rotation
        heads, groups, dim = survey.shape
        self.geometry = Geometry(
            layers=len(survey.modules),
            heads=heads,
            kv_groups=groups,
            head_dim=dim,
            pairs=survey.rotation.pairs,
            layout=survey.rotation.layout,
            native_context=rotary.native_context(self.module.config),
            windows=survey.windows,
            rotates=survey.rotates,
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    @cached_property
    def weights_sha256(self) -> str:
        """Digest of all parameters by name, the same for a GGUF, a folder and an in-memory model of one checkpoint.

        Values count as bfloat16, so that float32 and bfloat16 of one checkpoint have one digest.
        """
        digest = hashlib.sha256()
        names: dict[nn.Parameter, str] = {}
        for name, parameter in _parameters(self.module):
            names.setdefault(parameter, name)  # tied weights count once
        for parameter, name in sorted(names.items(), key=lambda item: item[1]):
            tensor = parameter.detach().bfloat16().cpu().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def with_scheme(self, scheme: str) -> "Model":
        """The same opened checkpoint under another scheme; weights are shared."""
        twin = object.__new__(Model)
        twin.__dict__.update(self.__dict__, scheme=scheme)
        return twin


def split_spec(spec: str) -> tuple[str, str]:
    """Split "CHECKPOINT[@SCHEME]" at the last "@"; the scheme defaults to "base"."""
    checkpoint, at, scheme = spec.rpartition("@")
    if not at:
        return spec, "base"
    if not checkpoint or not scheme:
        raise BadInput(
            f"bad model spec '{spec}': expected CHECKPOINT or CHECKPOINT@SCHEME, e.g. smollm2-135m@yarn:factor=8"
        )
    return checkpoint, scheme


def load(spec: Any, *, device: str = "auto", dtype: str = "auto", tokenizer: Any = None) -> Model:
    """Open a checkpoint for measuring.

    `spec` is a spec string ("smollm2-135m@yarn:factor=8", a folder, a .gguf file, a hub id, each with an
    optional @SCHEME), a transformers model, a TransformerBridge, or an already opened Model (returned as it is).
    `device` "auto" is cuda where there is one; `dtype` "auto" is float32 on CPU and bfloat16 on CUDA.

    Raises BadInput for a spec that cannot be read, Missing for a checkpoint that is not there,
    UnsupportedModel for an architecture that would be measured wrongly.
    """
    if isinstance(spec, Model):
        return spec
    if isinstance(spec, str):
        checkpoint, scheme = split_spec(spec)
        where = pick_device(device)
        module, identity = checkpoints.open_checkpoint(checkpoint, where, pick_dtype(dtype, where))
        model = Model(module, tokenizer, identity, scheme)
        if tokenizer is None:
            model.tokenizer = checkpoints.load_tokenizer(checkpoint)
        return model
    if type(spec).__module__.startswith("transformer_lens."):
        return Model(spec.original_model, tokenizer or spec.tokenizer, _identity(spec.original_model), bridge=spec)
    module = spec.get_base_model() if hasattr(spec, "get_base_model") else spec
    if not isinstance(module, PreTrainedModel):
        raise BadInput(
            f"cannot open a {type(spec).__name__}: give a spec string, a transformers model or a TransformerBridge"
        )
    return Model(module, tokenizer, _identity(module))


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"device '{device}' cannot be used here ({str(error).splitlines()[0]}); use --device auto or cpu"
        ) from error
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise BadInput(f"unknown dtype '{dtype}': use auto, fp32 or bf16")
    return known[dtype]


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Run the model without dropout or gradients; leaving restores its mode."""
    was_training = model.module.training
    model.module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.module.train(was_training)


@contextmanager
def delegated(bridge: Any) -> Iterator[None]:
    """Let a TransformerBridge's attention run its wrapped module's own forward, and so reach the seam."""
    with ExitStack() as stack:
        for block in bridge.blocks if bridge is not None else ():
            attn = block.attn
            inner = attn.original_component
            # The bridge forwards attribute writes to the wrapped module, so its own __dict__ is written instead.
            previous = attn.__dict__.get("forward")
            attn.__dict__["forward"] = _Delegate(inner)
            stack.callback(_restore_forward, attn, previous)
        yield


class _Delegate:
    """Calls the wrapped attention module, hooks included."""

    def __init__(self, inner: nn.Module):
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _restore_forward(attn: nn.Module, previous: Any) -> None:
    if previous is None:
        attn.__dict__.pop("forward", None)
    else:
        attn.__dict__["forward"] = previous


def _parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that they have without the wrappers of TransformerLens and peft."""
    if "_original_component" in module._modules:
        yield from _parameters(module.get_submodule("_original_component"), prefix)
        return
    yield from ((prefix + name, p) for name, p in module._parameters.items() if p is not None)
    for name, child in module.named_children():
        if not name.startswith("lora_"):
            yield from _parameters(child, prefix if name == "base_layer" else f"{prefix}{name}.")


def _identity(module: PreTrainedModel) -> str:
    return str(getattr(module.config, "_name_or_path", "") or f"in-memory {module.config.model_type}")
