"""All of a model in memory that opening and measuring could leave changed."""

import hashlib
import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def model_state(module: PreTrainedModel) -> tuple[Any, ...]:
    """Weights, buffers, configuration and attention implementation of every part, attributes, hooks, and the functions
    of the family's Python modules."""
    digest = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers(), *module.state_dict().items()]:
        value = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode())
        digest.update(value.numpy().tobytes())
    parts = [(id(part), sorted(vars(part)), part.training, _hooks(part)) for part in module.modules()]
    functions = {
        (name, key): id(value)
        for name in {type(part).__module__ for part in module.modules()}
        for key, value in vars(sys.modules[name]).items()
        if callable(value)
    }
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    configs = [
        (part.config.to_json_string(use_diff=False), part.config.to_dict(), part.config._attn_implementation)
        for part in models
    ]
    return digest.hexdigest(), parts, functions, configs


def _hooks(part: nn.Module) -> tuple[int, ...]:
    return tuple(len(hooks) for name, hooks in vars(part).items() if name.endswith("_hooks"))
