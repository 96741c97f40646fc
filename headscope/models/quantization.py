"""Checkpoints with quantized weights: the packages that open them, and a digest of their state."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from headscope.errors import BadInput

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


def quantized_state_digest(module: nn.Module) -> bytes:
    """SHA-256 of the tensors that quantized layers keep beside their parameters, such as scales; b"" if plain."""
    if getattr(module, "hf_quantizer", None) is None:
        return b""
    digest = hashlib.sha256()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in sorted(module.state_dict().items()):
        if name not in parameters and isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
