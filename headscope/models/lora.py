"""LoRA through peft: load an adapter folder into a model, verify its tensors, and digest the active adapters."""

import hashlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors.torch import load_file
from torch import nn

from headscope.base.model_spec import ANY_WEIGHTS
from headscope.base.user_input import quote
from headscope.errors import BadInput, ResourceMissing, first_line

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
UNSUPPORTED_SETTINGS = ("layer_replication", "megatron_config")
"""LoRA settings that change the model's layers or import a module."""
MATCHING_SECONDS = 5
"""Time limit for matching the regular expressions of a LoRA with the names of modules."""
MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    any(re.fullmatch(pattern, name) or re.match(rf"(.*\\.)?({pattern})$", name) for name in names)
"""

_modules_with_adapter_lora: "WeakSet[nn.Module]" = WeakSet()


def import_peft() -> Any:
    """The module peft. Raises ResourceMissing without the extra `lora`."""
    try:
        import peft
    except ImportError as error:
        raise ResourceMissing("a LoRA needs the package peft. Run pip install 'headscope[lora]'") from error
    return peft


def apply_lora(module: nn.Module, folder: Path, name: str) -> Any:
    """Load the LoRA in `folder` into `module` and return the PeftModel; `name` is the model's name in messages.

    Raises ResourceMissing without peft or safetensors weights, BadInput for another kind of adapter or tensors that do
    not fit; the module is then unchanged. peft runs no code from an adapter.
    """
    peft = import_peft()
    if not (folder / WEIGHTS_FILE).is_file():
        raise ResourceMissing(
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
        _refuse_slow_patterns(settings, [name for name, _ in module.named_modules()])
        stored = load_file(folder / WEIGHTS_FILE)
        with warnings.catch_warnings(action="ignore"):  # about unmatched tensors, which are refused below
            peft_model = peft.PeftModel.from_pretrained(module, str(folder))
    except Exception as error:  # peft raises many kinds of errors for a broken config or wrong shapes
        _remove_lora(module, trainable)
        raise BadInput(
            f"the LoRA in '{folder}' cannot be applied to '{name}' ({first_line(error)}). Use a plain LoRA that was "
            "trained on this checkpoint"
        ) from error
    try:
        _refuse_mismatch(stored, peft_model, folder, name)
    except BadInput:
        _remove_lora(module, trainable)
        raise
    return peft_model


def refuse_other_base(folder: Path, names: Sequence[str], lora_name: str) -> None:
    """Refuse a LoRA whose configuration names another base model than these `names` of the checkpoint.

    Only the last part of a name counts, since a folder may have been moved.
    """
    try:
        trained_on = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):  # apply_lora says what is wrong
        return
    last_parts = {_last_part(name) for name in names}
    if isinstance(trained_on, str) and trained_on and _last_part(trained_on) not in last_parts:
        raise BadInput(
            f"LoRA '{lora_name}' was trained on {quote(trained_on)}, not on {quote(names[0])}. Use that base "
            f"model, or apply it anyway with +{lora_name}{ANY_WEIGHTS}"
        )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].partition(":")[0].casefold()


def _refuse_slow_patterns(settings: dict[str, Any], module_names: list[str]) -> None:
    """Refuse regular expressions that take too long to match: peft would wait for them for ever."""
    patterns = [value for key in ("target_modules", "exclude_modules") if isinstance(value := settings.get(key), str)]
    for key in ("rank_pattern", "alpha_pattern"):
        patterns += list(settings.get(key) or {})
    layers_pattern = settings.get("layers_pattern") or []
    patterns += [layers_pattern] if isinstance(layers_pattern, str) else layers_pattern
    if not patterns:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", MATCHER],
            input=json.dumps([patterns, module_names]),
            capture_output=True,
            text=True,
            timeout=MATCHING_SECONDS,
            check=False,  # peft reports an invalid expression
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"a regular expression in {CONFIG_FILE} takes more than {MATCHING_SECONDS} s, e.g. {quote(patterns[0])}"
        ) from error


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


@contextmanager
def lora_of_adapter(module: nn.Module) -> Iterator[None]:
    """Count the LoRA that is applied to the module inside the `with` as part of an adapter, not of the checkpoint."""
    _modules_with_adapter_lora.add(module)
    try:
        yield
    finally:
        _modules_with_adapter_lora.discard(module)


def active_lora_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Tensors of the module's active, unmerged adapters, each with a text that names its layer, scaling and key."""
    if module in _modules_with_adapter_lora:
        return []
    tensors = []
    for index, (_, name, layer) in enumerate(peft_layers(module)):
        for adapter in layer.active_adapters if not layer.disable_adapters else ():
            if adapter in layer.merged_adapters:
                continue  # it is part of the weights
            header = f"{index} {name} {_lora_scaling(layer, adapter)}\n"
            # Not state_dict, which may change quantized base layers.
            for key, value in sorted([*layer.named_parameters(), *layer.named_buffers()]):
                if not key.startswith("base_layer.") and adapter in key.split("."):
                    tensors.append((f"{header}{key} {tuple(value.shape)}\n", value))
                    header = ""
    return tensors


def active_lora_digest(module: nn.Module) -> bytes:
    """SHA-256 of the module's active, unmerged adapters; b"" if there are none."""
    digest, tensors = hashlib.sha256(), active_lora_tensors(module)
    for name, tensor in tensors:
        digest.update(name.encode() + tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.digest() if tensors else b""


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
