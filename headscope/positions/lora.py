"""LoRA on the query and key projections, through peft: beside an adapter, on and off without a trace."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headscope.errors import Missing, UnsupportedModel
from headscope.models.checkpoint import LoadedModel
from headscope.models.lora import WEIGHTS_FILE, apply_lora

PROJECTIONS = ("q_proj", "k_proj")


def beside(adapter: Path) -> Path:
    """The folder of the LoRA that belongs to an adapter file: step-0010.safetensors -> step-0010.lora."""
    return adapter.with_suffix(".lora")


@contextmanager
def added(checkpoint: LoadedModel, rank: int, alpha: int, seed: int) -> Iterator[Any]:
    """Add an untrained LoRA (which changes nothing yet) and yield the PeftModel; leaving takes it off."""
    from peft import LoraConfig, get_peft_model

    names = {name: module for name, module in checkpoint.module.named_modules() if name.endswith(PROJECTIONS)}
    if len(names) != len(PROJECTIONS) * len(checkpoint.attention_modules) or not all(
        isinstance(module, nn.Linear) for module in names.values()
    ):
        raise UnsupportedModel(
            f"'{checkpoint.name}' has no separate {' and '.join(PROJECTIONS)} in every layer to put a LoRA on: "
            "learn positions alone (--strategy adarope)"
        )
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(PROJECTIONS))
    torch.manual_seed(seed)
    wrapped = get_peft_model(checkpoint.module, config)
    try:
        yield wrapped
    finally:
        wrapped.unload()


@contextmanager
def attached(checkpoint: LoadedModel, folder: Path) -> Iterator[None]:
    """Run the model with a stored LoRA inside the `with`. Raises Missing if it is not there."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise Missing(f"the adapter was learned with a LoRA, but '{folder}' holds none: keep it beside the adapter")
    frozen = {name: parameter.requires_grad for name, parameter in checkpoint.module.named_parameters()}
    wrapped = apply_lora(checkpoint.module, folder, checkpoint.name)
    try:
        yield
    finally:
        wrapped.unload()
        for name, parameter in checkpoint.module.named_parameters():
            parameter.requires_grad_(frozen[name])


def sha256(folder: Path) -> str:
    """Digest of the stored LoRA's weights."""
    return hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
