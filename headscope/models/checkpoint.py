"""A loaded checkpoint: weights, tokenizer, and the geometry found by model inspection.

The source is an alias, a folder, a .gguf file, a hub id, a transformers model in memory or a TransformerBridge. Config
fields differ by family, so the geometry is measured in a short forward pass: which modules attend, with what shapes,
which ones rotate and in which layout. Models that would be measured wrongly are refused.
"""

import logging
import math
import threading
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from headscope.attention.contexts import entering, refusing_other_threads
from headscope.attention.geometry import Geometry
from headscope.base.model_identity import ModelIdentity
from headscope.base.model_spec import ModelSpec
from headscope.compat.torch import original_module
from headscope.compat.transformers import NAME_OR_PATH
from headscope.errors import BadInput
from headscope.models import loading, lora, module_facts, open_contexts, quantization
from headscope.models.bridge import delegating_attention, is_bridge
from headscope.models.device_map import refuse_offloaded
from headscope.models.eager_check import check_against_eager
from headscope.models.inspection import CheckpointRotation, evaluation_mode, inspect_model
from headscope.models.padding_check import PaddingCheck
from headscope.models.rope_settings import native_context, original_context
from headscope.models.rotation import preserving_frequencies, rope_types
from headscope.models.unsupported import (
    refuse_autocast,
    refuse_by_config,
    refuse_inference_weights,
    refuse_without_language_head,
)
from headscope.models.weight_digests import WeightTracker, named_tensors

log = logging.getLogger("headscope")


@dataclass(eq=False)
class Checkpoint:
    """Weights with their tokenizer, and the checkpoint's `name` in a run.

    `module` is the transformers model, `attention_modules` its attention modules by layer, `rotation` its own rotation,
    `bridge` the TransformerBridge around it, if any. headscope never changes the module permanently.
    """

    module: PreTrainedModel
    tokenizer: Any
    name: str
    bridge: Any = None
    geometry: Geometry = field(init=False)
    attention_modules: tuple[nn.Module, ...] = field(init=False)
    rotation: CheckpointRotation = field(init=False)
    _weights: WeightTracker = field(init=False)
    _frequencies: list[torch.Tensor] = field(init=False)
    padding_check: PaddingCheck = field(init=False)

    def __post_init__(self) -> None:
        refuse_autocast()
        refuse_inference_weights(self.module, self.name)
        refuse_offloaded(self.module, self.name)
        self._weights = WeightTracker(self.module)
        is_quantized = bool(quantization.describe_quantization(self.module))
        if is_quantized:
            self._weights.digests()  # the first pass packs quantised weights in another order
        refuse_by_config(self.module.config, self.name)
        refuse_without_language_head(self.module, self.name)
        _check_values(self.module, self.name)
        with (
            entering(self.module),
            refusing_other_threads(self.module.modules(), self.name, threading.current_thread()),
            delegating_attention(self.bridge),
            preserving_frequencies(self.module.modules()),
        ):
            _refuse_open_contexts(self.module, self.name)
            inspection = inspect_model(self.module)
            check_against_eager(self.module, inspection.attention_modules, inspection.layer_numbers)
        if is_quantized:
            self._weights.keep_digests()
        self.attention_modules = inspection.attention_modules
        self.rotation = inspection.rotation
        self.padding_check = PaddingCheck(self.module, rotates=self.rotation.pairs > 0)
        self._frequencies = [buffer.clone() for buffer in _fixed_frequencies(self.rotation)]
        # Without a declared length, the widest window is the farthest that any query was trained to attend.
        native = native_context(self.module.config) or max(filter(None, inspection.windows), default=0)
        self.geometry = Geometry(
            layer_numbers=inspection.layer_numbers,
            heads=max(inspection.layer_heads),
            kv_groups=max(inspection.layer_kv_groups),
            head_dim=max(inspection.layer_head_dims),
            pairs=self.rotation.pairs,
            rotary_layout=self.rotation.layout,
            native_context=native,
            original_context=original_context(self.module.config) or native,
            windows=inspection.windows,
            layer_rotates=inspection.layer_rotates,
            layer_kv_groups=inspection.layer_kv_groups,
            rotary_start=self.rotation.rotary_start,
            rotation_direction=self.rotation.direction,
            layer_heads=inspection.layer_heads,
            layer_head_dims=inspection.layer_head_dims,
            layer_pairs=self.rotation.layer_pairs,
        )

    @property
    def device(self) -> torch.device:
        """The device of the input tokens; layers of a model on several devices have their own."""
        device: torch.device = self.module.device
        return device

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the present parameters, rounded to bfloat16: see `WeightDigests`."""
        return self._weights.digests().bfloat16

    @property
    def identity(self) -> ModelIdentity:
        """Everything that determines what the checkpoint computes now, without a position scheme.

        Raises BadInput if its rotary frequencies were changed after it was loaded.
        """
        present = _fixed_frequencies(self.rotation)
        if not all(map(torch.equal, present, self._frequencies)):
            raise BadInput(
                f"the rotary frequencies of '{self.name}' were changed after it was loaded. Load the model again"
            )
        return ModelIdentity(
            weights=self._weights.digests(),
            dtype=str(self.module.dtype).removeprefix("torch."),
            quantization=quantization.describe_quantization(self.module),
            configuration=module_facts.configuration(self.module),
            constants=module_facts.constants(self.module),
            geometry=asdict(self.geometry),
            hooks=module_facts.foreign_hooks(self.module),
            contexts=tuple(
                context.description for context in open_contexts.contexts_of(self.module) if context.schedule is None
            ),
        )


class LoadedModel(Protocol):
    """The interface of a loaded checkpoint, alone or in a model with a position scheme."""

    @property
    def module(self) -> PreTrainedModel: ...
    @property
    def name(self) -> str: ...
    @property
    def bridge(self) -> Any: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def attention_modules(self) -> tuple[nn.Module, ...]: ...
    @property
    def rotation(self) -> CheckpointRotation: ...
    @property
    def padding_check(self) -> PaddingCheck: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def weights_sha256(self) -> str: ...
    @property
    def identity(self) -> ModelIdentity: ...


@torch.inference_mode(False)  # tensors that are made in inference mode have no gradients and no record of changes
def open_checkpoint(spec: ModelSpec, device: str, dtype: str, tokenizer: Any = None) -> Checkpoint:
    """Open the checkpoint of `spec`, without its position scheme; `tokenizer` replaces its own.

    `device` "auto" is CUDA if available, and all GPUs for weights that do not fit one. `dtype` "auto" is float32 on CPU
    and bfloat16 on CUDA.

    Raises BadInput for an invalid name, device or dtype and for weights that do not fit, ResourceMissing for a
    checkpoint that does not exist, UnsupportedModel for an architecture that would be measured wrongly.
    """
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)
    module, identity = loading.load_module(spec, torch_device, torch_dtype, spread=device == "auto")
    checkpoint = Checkpoint(module, tokenizer, identity)
    if tokenizer is None:
        checkpoint.tokenizer = loading.load_tokenizer(spec.checkpoint)
    return checkpoint


def as_checkpoint(model: Any, tokenizer: Any = None) -> Checkpoint:
    """The checkpoint of a transformers model, a PeftModel or a TransformerBridge in memory, or of one in torch.compile.

    Raises BadInput for other objects, UnsupportedModel for an architecture that would be measured wrongly.
    """
    model = original_module(model)
    if is_bridge(model):
        name = _in_memory_name(model.original_model)
        return Checkpoint(model.original_model, tokenizer or model.tokenizer, name, model)
    module = original_module(lora.unwrap_peft(model)) if hasattr(model, "get_base_model") else model
    if not isinstance(module, PreTrainedModel):
        raise BadInput(
            f"unsupported model object '{type(model).__name__}'. Use a spec string, a transformers model or a "
            "TransformerBridge"
        )
    return Checkpoint(module, tokenizer, _in_memory_name(module))


def pick_device(device: str) -> torch.device:
    """The device of that name; "auto" is CUDA if available. Raises BadInput if it cannot hold a tensor."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch_device = torch.device(device)
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError, ImportError, AttributeError, TypeError) as error:
        names = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise BadInput(
            f"device '{device}' cannot be used on this machine. Use --device with one of: {', '.join(names)}"
        ) from error
    if torch_device.type == "meta":
        raise BadInput("device 'meta' holds no tensor data. Use --device auto or cpu")
    return torch_device


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is float32 on CPU and bfloat16 elsewhere. Raises BadInput for other names.

    bfloat16 on a CPU would add an error far below the sampling error (`make bench-bfloat16` measures it). But numbers
    would then differ between machines, and models are compared on the same documents, where sampling errors cancel.
    """
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtypes = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise BadInput(f"unknown dtype '{dtype}'. Use one of: auto, fp32, bf16")
    return dtypes[dtype]


def evaluating(model: LoadedModel) -> AbstractContextManager[None]:
    """Run the model without dropout or gradients; leaving restores its mode."""
    return evaluation_mode(model.module)


def _fixed_frequencies(rotation: CheckpointRotation) -> list[torch.Tensor]:
    """The frequencies of the rotary modules, without those that follow the length of the last text."""
    return [
        buffer
        for module in rotation.rotary_modules
        if not rope_types(module) & {"dynamic", "longrope"}
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def _refuse_open_contexts(module: PreTrainedModel, name: str) -> None:
    """Refuse to inspect a model that a context changes: the context would pass for the model's own."""
    if contexts := open_contexts.contexts_of(module):
        raise BadInput(
            f"'{name}' is inside {contexts[-1].description}. Load the model before that context, and use the loaded "
            "model inside it"
        )


def _check_values(module: PreTrainedModel, name: str) -> None:
    """Refuse weights that are not finite, naming the first, and embeddings of zeros. Warn of other matrices of zeros.

    A sum is finite only if all of its terms are.
    """
    parameters = [(key, p.detach()) for key, p in named_tensors(module) if isinstance(p, nn.Parameter)]
    weights = [(key, p) for key, p in parameters if p.is_floating_point()]
    sums = [p.sum(dtype=torch.float32).to(weights[0][1].device) for _, p in weights]
    totals = torch.stack(sums).tolist() if weights else []
    zeros = []
    for (key, parameter), total in zip(weights, totals, strict=True):
        if not math.isfinite(total) and not parameter.isfinite().all():  # the sum alone may overflow
            raise BadInput(
                f"cannot measure '{name}': its weights are not finite, first in '{key}'. Its training diverged, or its "
                "file is damaged. Use an earlier checkpoint, or download it again"
            )
        if total == 0 and parameter.dim() > 1 and not parameter.any():
            zeros.append((key, parameter))
    embeddings = module.get_input_embeddings().weight
    if any(parameter.data_ptr() == embeddings.data_ptr() for _, parameter in zeros):
        raise BadInput(f"cannot measure '{name}': its embeddings are all 0. Download it again")
    if zeros:
        log.warning("%d weight matrices of '%s' are all 0, first '%s'", len(zeros), name, zeros[0][0])


def _in_memory_name(module: PreTrainedModel) -> str:
    """The name of a model in memory in a run."""
    return str(NAME_OR_PATH.of(module.config) or f"in-memory {module.config.model_type}")
