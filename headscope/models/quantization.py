"""Checkpoints with quantized weights: the packages that open them, and a digest of their state."""

import hashlib
from typing import Any

import torch
from torch import nn

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


def quantization_method(config: Any) -> str:
    """The quantization method that a config declares; "" for plain weights."""
    declared = getattr(config, "quantization_config", None)
    method = declared.get("quant_method") if isinstance(declared, dict) else getattr(declared, "quant_method", None)
    return str(getattr(method, "value", method) or "")


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
