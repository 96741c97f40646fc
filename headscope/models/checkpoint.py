"""An opened checkpoint: weights, tokenizer, and the geometry that was seen in it.

A checkpoint is named by an alias, a folder, a .gguf file or a hub id, or given as an in-memory transformers model or
a TransformerBridge. Its geometry is not read from config fields that differ by family but seen in a short forward
pass through the seam: which modules attend, with what shapes, which of them rotate and in which layout. What would be
measured wrongly is refused by name. This file knows nothing of position schemes.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.attention.geometry import Geometry
from headscope.errors import BadInput, first_line
from headscope.models import loading, lora, quantization
from headscope.models.bridge import delegated, is_bridge
from headscope.models.eager_check import refuse_disagreement
from headscope.models.eval_mode import inference
from headscope.models.inspection import BaseRotation, survey
from headscope.models.unsupported import native_context, refuse_by_config


@dataclass(eq=False)
class Checkpoint:
    """Weights with their tokenizer, opened, and the `name` that they go by in a run.

    `module` is the transformers model, `attention` its attention modules by layer, `rotation` its own rotation,
    `bridge` the TransformerBridge that wraps it, if it came as one. Nothing that headscope does changes the module.
    """

    module: PreTrainedModel
    tokenizer: Any
    name: str
    bridge: Any = None
    geometry: Geometry = field(init=False)
    attention: tuple[nn.Module, ...] = field(init=False)
    rotation: BaseRotation = field(init=False)
    _worn: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._worn = lora.digest(self.module)  # now: what a scheme puts on for a while is not the checkpoint's
        refuse_by_config(self.module.config, self.name)
        _refuse_unsound(self.module, self.name)
        with delegated(self.bridge):
            seen = survey(self.module)
            refuse_disagreement(self.module, seen.modules, seen.numbers)
        self.attention = seen.modules
        self.rotation = seen.rotation
        heads, groups, dim = seen.shape
        self.geometry = Geometry(
            layer_numbers=seen.numbers,
            heads=heads,
            kv_groups=groups,
            head_dim=dim,
            pairs=seen.rotation.pairs,
            rotary_layout=seen.rotation.layout,
            # Where no length is told, no query was ever to see more than the widest window.
            native_context=native_context(self.module.config) or max(filter(None, seen.windows), default=0),
            windows=seen.windows,
            layer_rotates=seen.rotates,
            rotary_start=seen.rotation.start,
            rotation_direction=seen.rotation.direction,
        )

    @property
    def device(self) -> torch.device:
        """Where its tokens go; layers of a checkpoint that is spread over several devices have their own."""
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
        digest.update(self._worn + quantization.digest(self.module))
        return digest.hexdigest()


class Opened(Protocol):
    """What is asked of an opened checkpoint, be it by itself or within a model under a position scheme."""

    @property
    def module(self) -> PreTrainedModel: ...
    @property
    def name(self) -> str: ...
    @property
    def bridge(self) -> Any: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def attention(self) -> tuple[nn.Module, ...]: ...
    @property
    def rotation(self) -> BaseRotation: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def weights_sha256(self) -> str: ...


def open_checkpoint(name: str, device: str, dtype: str, tokenizer: Any = None) -> Checkpoint:
    """Open the checkpoint called `name`, with its own tokenizer unless another is given.

    `device` "auto" is cuda where there is one, and all GPUs for weights that do not fit one; `dtype` "auto" is float32
    on CPU and bfloat16 on CUDA.

    Raises BadInput for a name, device or dtype that cannot be read and for weights that do not fit, Missing for a
    checkpoint that is not there, UnsupportedModel for an architecture that would be measured wrongly.
    """
    where = pick_device(device)
    module, identity = loading.load_module(name, where, pick_dtype(dtype, where), spread=device == "auto")
    checkpoint = Checkpoint(module, tokenizer, identity)
    if tokenizer is None:
        checkpoint.tokenizer = loading.load_tokenizer(name)
    return checkpoint


def opened(given: Any, tokenizer: Any = None) -> Checkpoint:
    """The checkpoint that an in-memory transformers model or a TransformerBridge holds.

    Raises BadInput for anything else, UnsupportedModel for an architecture that would be measured wrongly.
    """
    if is_bridge(given):
        return Checkpoint(given.original_model, tokenizer or given.tokenizer, _name(given.original_model), given)
    module = lora.unwrapped(given) if hasattr(given, "get_base_model") else given  # peft wraps it
    if not isinstance(module, PreTrainedModel):
        raise BadInput(
            f"cannot open a {type(given).__name__}: give a spec string, a transformers model or a TransformerBridge"
        )
    return Checkpoint(module, tokenizer, _name(module))


def pick_device(device: str) -> torch.device:
    """The device of that name; "auto" is cuda where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        raise BadInput(
            f"device '{device}' cannot be used here ({first_line(error)}); use --device auto or cpu"
        ) from error
    if chosen.type == "meta":
        raise BadInput("device 'meta' holds shapes without numbers; use --device auto or cpu")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is float32 on CPU and bfloat16 elsewhere.

    Where a CPU has bfloat16, its error is far below that of sampling (`headscope bench` tells), but one machine would
    give other numbers than the next, and models are compared on the same documents, where sampling errors cancel.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise BadInput(f"unknown dtype '{dtype}': use auto, fp32 or bf16")
    return known[dtype]


def evaluating(checkpoint: Opened) -> AbstractContextManager[None]:
    """Run its module without dropout or gradients; leaving restores the mode."""
    return inference(checkpoint.module)


def _parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that they have without the wrappers of TransformerLens and peft."""
    if "_original_component" in module._modules:
        yield from _parameters(module.get_submodule("_original_component"), prefix)
        return
    yield from ((prefix + name, p) for name, p in module._parameters.items() if p is not None)
    for name, child in module.named_children():
        if not name.startswith("lora_"):
            yield from _parameters(child, prefix if name == "base_layer" else f"{prefix}{name}.")


def _refuse_unsound(module: nn.Module, name: str) -> None:
    """Refuse weights that are not numbers, naming the first. A sum is finite only where all of its terms are."""
    named = [(key, p.detach()) for key, p in _parameters(module) if p.is_floating_point() and not p.is_meta]
    sums = [p.sum(dtype=torch.float32).to(named[0][1].device) for _, p in named]
    finite = torch.stack(sums).isfinite() if named else torch.ones(0)
    for (key, parameter), sound in zip(named, finite.tolist(), strict=True):
        if not sound and not parameter.isfinite().all():  # the sum alone may be too large
            raise BadInput(f"cannot measure '{name}': its weights are not finite, first in '{key}'; fetch it again")


def _name(module: PreTrainedModel) -> str:
    """What a model in memory goes by in a run."""
    return str(getattr(module.config, "_name_or_path", "") or f"in-memory {module.config.model_type}")
