"""Checkpoints with quantized weights: the packages that open them, and a digest of their state."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from headscope.compat.torch import SAVE_STATE
from headscope.errors import BadInput, UnsupportedModel

PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel optimum",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}
"""Packages to install, by quantization method."""


PLAIN_FORMATS = {"F64", "F32", "F16", "BF16"}
"""Number formats of safetensors for weights that need no scales."""


def quantization_method(config: Any) -> str:
    """The quantization method that a config declares; "" for plain weights."""
    declared = getattr(config, "quantization_config", None)
    method = declared.get("quant_method") if isinstance(declared, dict) else getattr(declared, "quant_method", None)
    return str(getattr(method, "value", method) or "")


def refuse_unscaled_weights(files: Iterable[Path], name: str) -> None:
    """Refuse a plain checkpoint whose weight matrices are stored as small numbers, such as int8: it has no scales."""
    for file in files:
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (not a mapping)
                tensor = weights.get_slice(key)
                if key.endswith(".weight") and len(tensor.get_shape()) > 1 and tensor.get_dtype() not in PLAIN_FORMATS:
                    raise BadInput(
                        f"checkpoint '{name}' stores {tensor.get_dtype()} numbers in '{key}', but its config names no "
                        "quantization that scales them. Use the original checkpoint, or restore quantization_config"
                    )


def describe_quantization(module: nn.Module) -> str:
    """The quantization of a loaded model, e.g. "bitsandbytes 4-bit"; "" for plain weights."""
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is None:
        return ""
    config = quantizer.quantization_config
    method = quantization_method(module.config) or str(getattr(config, "quant_method", "quantized"))
    bits = 4 if getattr(config, "load_in_4bit", False) else 8 if getattr(config, "load_in_8bit", False) else None
    return f"{method} {bits}-bit" if bits else method


def quantized_state_digest(module: nn.Module) -> bytes:
    """SHA-256 of the tensors that quantized layers keep beside their parameters, such as scales; b"" if plain."""
    if getattr(module, "hf_quantizer", None) is None:
        return b""
    digest = hashlib.sha256()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in sorted(_state(module).items()):
        if name not in parameters and isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def refuse_gradients(module: nn.Module, name: str) -> None:
    """Raise UnsupportedModel for 4-bit weights that bitsandbytes has packed on a CPU: they have no gradients."""
    if any(map(_is_packed, module.modules())):
        raise UnsupportedModel(
            f"estimates are not possible for {name}: bitsandbytes computes no gradients of 4-bit weights on a CPU. "
            "Use --method exact, or another model"
        )


def _is_packed(part: nn.Module) -> bool:
    """Whether bitsandbytes has packed the 4-bit weights of a layer for passes on a CPU."""
    quant_state = getattr(getattr(part, "weight", None), "quant_state", None)
    return bool(getattr(quant_state, "packing_format_for_cpu", False))


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a quantized model by name.

    bitsandbytes packs 4-bit weights in another order in the first pass on a CPU, and `state_dict` would unpack the live
    model wrongly. The scales of a packed layer are read from its quantization state.
    """
    state: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if _is_packed(part):
            kept = vars(part.weight.quant_state).items()
            state |= {f"{prefix}weight.{name}": value for name, value in kept if isinstance(value, torch.Tensor)}
        else:
            SAVE_STATE.of(part)(state, prefix, False)
    return state
