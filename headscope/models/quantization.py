"""Checkpoints with quantised weights: the packages that open them, and what their weights are beyond parameters."""

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
"""What to install to open weights that were quantised in this way."""


def method(config: Any) -> str:
    """How a config says that its weights were quantised; "" for plain ones."""
    told = getattr(config, "quantization_config", None)
    named = told.get("quant_method") if isinstance(told, dict) else getattr(told, "quant_method", None)
    return str(getattr(named, "value", named) or "")


def digest(module: nn.Module) -> bytes:
    """Digest of what quantised layers keep beside their parameters, such as scales; empty for a plain model."""
    if getattr(module, "hf_quantizer", None) is None:
        return b""
    whole = hashlib.sha256()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, stored in sorted(module.state_dict().items()):
        if name not in parameters and isinstance(stored, torch.Tensor):
            plain = stored.detach().cpu().contiguous()
            whole.update(f"{name} {tuple(plain.shape)} {plain.dtype}\n".encode())
            whole.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.digest()
