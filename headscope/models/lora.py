"""LoRA through peft: put on a model from a folder, checked tensor by tensor; and what a model that wears one is."""

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from headscope.errors import BadInput, Missing, first_line

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NOT_MEASURED = ("layer_replication", "megatron_config")
"""Settings of a LoRA that make another model of it, or import what they name."""


def put_on(module: nn.Module, folder: Path, name: str) -> Any:
    """The PeftModel of `module`, which goes by `name`, with the LoRA stored in `folder` at work.

    Raises Missing where the folder holds none in safetensors, BadInput for another kind of adapter and for one that
    does not fit; the module is then as it was. peft runs no code that an adapter brings.
    """
    from peft import PeftModel

    if not (folder / WEIGHTS).is_file():
        raise Missing(f"no LoRA in '{folder}': it has no {WEIGHTS} (pickled weights are not opened); check the path")
    if worn(module):
        raise BadInput(f"'{name}' wears a LoRA already: merge it (merge_and_unload) before another is put on")
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = settings.get("peft_type")
        if kind != "LORA" or any(settings.get(key) for key in NOT_MEASURED):
            raise ValueError(f"only plain LoRA is measured, not {kind} with {settings}"[:200])
        stored = load_file(folder / WEIGHTS)
        with warnings.catch_warnings(action="ignore"):  # of tensors without a place, which are looked for below
            wrapped = PeftModel.from_pretrained(module, str(folder))
    except Exception as error:  # whatever peft makes of a broken config or of weights of another shape
        _take_off(module, learning)
        raise BadInput(f"the LoRA in '{folder}' cannot be put on '{name}' ({first_line(error)})") from error
    try:
        _refuse_unread(stored, wrapped, folder, name)
    except BadInput:
        _take_off(module, learning)
        raise
    return wrapped


def worn(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """The layers that peft has put in place of others: parent, name in it, layer."""
    if "peft" not in sys.modules:  # which takes a second to import
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseTunerLayer)
    ]


def unwrapped(given: Any) -> Any:
    """The transformers model within a PeftModel, its adapters at work in it. Raises BadInput where they are not."""
    if given.active_peft_config.is_prompt_learning:
        raise BadInput(
            f"cannot open a model under {given.active_peft_config.peft_type.value}: it works by prompts, not within "
            "the layers that are measured; load the plain model"
        )
    return given.get_base_model()


def digest(module: nn.Module) -> bytes:
    """Digest of the adapters at work in the module, beyond its own weights; empty where there are none."""
    whole, found = hashlib.sha256(), False
    for at, (_, name, layer) in enumerate(worn(module)):
        for adapter in layer.active_adapters if not layer.disable_adapters else ():
            if adapter in layer.merged_adapters:
                continue  # it is in the weights
            found = True
            whole.update(f"{at} {name} {_factor(layer, adapter)}\n".encode())
            for key, tensor in sorted(layer.state_dict().items()):
                if not key.startswith("base_layer.") and adapter in key.split("."):
                    stored = tensor.detach().float().cpu().contiguous()
                    whole.update(f"{key} {tuple(stored.shape)}\n".encode() + stored.numpy().tobytes())
    return whole.digest() if found else b""


def _factor(layer: Any, adapter: str) -> float | None:
    """What a LoRA's product is multiplied by; None for another kind of adapter."""
    from peft.tuners.lora import LoraLayer

    return layer.scaling.get(adapter) if isinstance(layer, LoraLayer) else None


def _take_off(module: nn.Module, learning: list[nn.Parameter]) -> None:
    """Undo what peft has done to the module so far; `learning` are the parameters that were not frozen."""
    for parent, name, layer in worn(module):
        setattr(parent, name, layer.get_base_layer())
    for parameter in learning:
        parameter.requires_grad_(True)


def _refuse_unread(stored: dict[str, torch.Tensor], wrapped: Any, folder: Path, name: str) -> None:
    """Every stored tensor has its place in the model and every place its tensor; peft would only warn."""
    from peft import get_peft_model_state_dict

    places = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    if strange := sorted(stored.keys() ^ places.keys()):
        lacks = f"'{name}' has no place for" if strange[0] in stored else "it lacks"
        raise BadInput(f"the LoRA in '{folder}' does not fit: {lacks} '{strange[0]}' ({len(strange)} such tensors)")
    for key, tensor in stored.items():
        if not tensor.isfinite().all():
            raise BadInput(f"the LoRA in '{folder}' holds numbers that are not finite, in '{key}': learn it anew")
