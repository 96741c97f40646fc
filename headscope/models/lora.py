"""LoRA through peft: load an adapter folder into a model, verify its tensors, and digest the active adapters."""

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from headscope.errors import BadInput, Missing, first_line

log = logging.getLogger("headscope")

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
UNSUPPORTED_SETTINGS = ("layer_replication", "megatron_config")
"""LoRA settings that change the model's layers or import a module."""


def apply_lora(module: nn.Module, folder: Path, name: str) -> Any:
    """Load the LoRA in `folder` into `module` and return the PeftModel; `name` is the model's name in messages.

    Raises Missing if the folder has no safetensors weights, BadInput for another kind of adapter or tensors that do not
    fit; the module is then unchanged. peft runs no code from an adapter.
    """
    from peft import PeftModel

    if not (folder / WEIGHTS_FILE).is_file():
        raise Missing(
            f"no LoRA in '{folder}': it has no {WEIGHTS_FILE}, and pickled weights are not opened. Save it with "
            "safe_serialization=True"
        )
    if peft_layers(module):
        raise BadInput(f"'{name}' already has a LoRA. Merge it (merge_and_unload) before applying another")
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        kind = settings.get("peft_type")
        if kind != "LORA" or any(settings.get(key) for key in UNSUPPORTED_SETTINGS):
            raise ValueError(f"only plain LoRA is supported, not {kind} with {settings}"[:200])
        stored = load_file(folder / WEIGHTS_FILE)
        with warnings.catch_warnings(action="ignore"):  # about unmatched tensors, which are refused below
            peft_model = PeftModel.from_pretrained(module, str(folder))
    except Exception as error:  # peft raises many kinds of errors for a broken config or wrong shapes
        _remove_lora(module, trainable)
        raise BadInput(f"the LoRA in '{folder}' cannot be applied to '{name}' ({first_line(error)})") from error
    try:
        _refuse_mismatch(stored, peft_model, folder, name)
    except BadInput:
        _remove_lora(module, trainable)
        raise
    return peft_model


def warn_about_base(folder: Path, checkpoint_names: Sequence[str]) -> None:
    """Warn if the LoRA in `folder` names another checkpoint as its base than all of these names of the checkpoint.

    Only the last parts of paths and hub ids are compared, without revisions.
    """

    def last_part(name: str) -> str:
        return PurePath(name).name.partition(":")[0].casefold()

    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    trained_on = str(settings.get("base_model_name_or_path") or "")
    if trained_on and last_part(trained_on) not in map(last_part, checkpoint_names):
        log.warning(
            "the LoRA in '%s' was trained on '%s' and is applied to '%s'. Make sure that they are the same checkpoint",
            folder,
            trained_on,
            checkpoint_names[0],
        )


def peft_layers(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """The layers that peft has inserted: (parent, attribute name, layer)."""
    if "peft" not in sys.modules:  # importing it takes a second
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseTunerLayer)
    ]


def unwrap_peft(peft_model: Any) -> Any:
    """The transformers model in a PeftModel, adapters included. Raises BadInput for prompt learning."""
    if peft_model.active_peft_config.is_prompt_learning:
        raise BadInput(
            f"unsupported PEFT method {peft_model.active_peft_config.peft_type.value}: prompt learning acts outside "
            "the layers that headscope measures. Load the plain model"
        )
    return peft_model.get_base_model()


def adapter_digest(module: nn.Module) -> bytes:
    """SHA-256 of the module's active, unmerged adapters; b"" if there are none."""
    digest, has_adapter = hashlib.sha256(), False
    for index, (_, name, layer) in enumerate(peft_layers(module)):
        for adapter in layer.active_adapters if not layer.disable_adapters else ():
            if adapter in layer.merged_adapters:
                continue  # it is part of the weights
            has_adapter = True
            digest.update(f"{index} {name} {_lora_scaling(layer, adapter)}\n".encode())
            for key, value in sorted(layer.state_dict().items()):
                if not key.startswith("base_layer.") and adapter in key.split("."):
                    tensor = value.detach().float().cpu().contiguous()
                    digest.update(f"{key} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    return digest.digest() if has_adapter else b""


def _lora_scaling(layer: Any, adapter: str) -> float | None:
    """The factor of a LoRA's product; None for another kind of adapter."""
    from peft.tuners.lora import LoraLayer

    return layer.scaling.get(adapter) if isinstance(layer, LoraLayer) else None


def _remove_lora(module: nn.Module, trainable: list[nn.Parameter]) -> None:
    """Undo what peft has done to the module so far; `trainable` are the parameters that it froze."""
    for parent, name, layer in peft_layers(module):
        setattr(parent, name, layer.get_base_layer())
    for parameter in trainable:
        parameter.requires_grad_(True)


def _refuse_mismatch(stored: dict[str, torch.Tensor], peft_model: Any, folder: Path, name: str) -> None:
    """Refuse stored tensors that the model lacks, missing ones and non-finite ones; peft would only warn."""
    from peft import get_peft_model_state_dict

    expected = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    if unmatched := sorted(stored.keys() ^ expected.keys()):
        problem = f"'{name}' has no place for" if unmatched[0] in stored else "it lacks"
        count = f"{len(unmatched)} such tensor{'s' * (len(unmatched) > 1)}"
        raise BadInput(
            f"the LoRA in '{folder}' does not fit: {problem} '{unmatched[0]}' ({count}). Use a LoRA that was "
            "trained on this checkpoint"
        )
    for key, tensor in stored.items():
        if not tensor.isfinite().all():
            raise BadInput(
                f"the LoRA in '{folder}' holds numbers that are not finite, in '{key}'. Download it again, or "
                "retrain it"
            )
