"""YaRN written into a family's own rotary embedding, by hand: what the family then computes is the truth for ours."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import sizes

FACTOR = 4.0
T = TypeVar("T")


@contextmanager
def yarn_by_hand(module: PreTrainedModel) -> Iterator[None]:
    """Its full-attention rotary embeddings with YaRN's inverse frequencies and factor (Peng et al. 2023)."""
    with ExitStack() as stack:
        for rotary in module.modules():
            if isinstance(table := getattr(rotary, "embed_positions", None), Tensor):
                stack.callback(table.copy_, table.clone())
                table.copy_(yarn_table(table, module.config.max_position_embeddings))
            for name, inv_freq in list(rotary.named_buffers(recurse=False)):
                if not name.endswith("inv_freq") or "original" in name or "sliding" in name:
                    continue
                factor = name.replace("inv_freq", "attention_scaling")
                before = getattr(rotary, factor, 1.0)
                if isinstance(getattr(rotary, "rope_type", None), str):  # some make others of their own in every pass
                    stack.callback(setattr, rotary, "rope_type", rotary.rope_type)
                    rotary.rope_type = "default"
                ropes = getattr(module.config.get_text_config(), "rope_parameters", None) or {}
                native = getattr(module.config.get_text_config(), "max_position_embeddings", sizes.WINDOW)
                rope = ropes.get(name.removesuffix("_inv_freq"), ropes)
                setattr(rotary, name, yarn_frequencies(inv_freq, rope, native))
                setattr(rotary, factor, 0.1 * math.log(FACTOR) + 1)
                stack.callback(setattr, rotary, name, inv_freq)
                stack.callback(setattr, rotary, factor, before)
                if hasattr(rotary, "rope_init_fn"):  # called in every pass by some
                    edited = getattr(rotary, name), getattr(rotary, factor)
                    stack.callback(setattr, rotary, "rope_init_fn", rotary.rope_init_fn)
                    rotary.rope_init_fn = partial(_always, edited)
        yield


def yarn_frequencies(inv_freq: Tensor, rope: dict[str, Any], native: int) -> Tensor:
    """YaRN's frequencies [P] in place of base^(-f/P): divided by the factor where wavelengths are long."""
    pairs = len(inv_freq)
    base = rope.get("rope_theta") or float(inv_freq[0] / inv_freq[1]) ** pairs
    native = rope.get("original_max_position_embeddings", native)
    plain = base ** (-torch.arange(pairs) / pairs) * (inv_freq != 0)  # a proportional rope turns only some pairs

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(native / (times * 2 * math.pi)) / math.log(base)

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), 2 * pairs - 1)
    ramp = ((torch.arange(pairs) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / FACTOR * ramp + plain * (1 - ramp)


def yarn_table(table: Tensor, native: int) -> Tensor:
    """A table of sin and cos by position [L, 2P] with base 10,000, as GPT-J has it, under YaRN."""
    plain = 10_000.0 ** (-torch.arange(table.shape[1] // 2) / (table.shape[1] // 2))
    angles = torch.arange(len(table))[:, None] * yarn_frequencies(plain, {"rope_theta": 10_000.0}, native)
    return torch.cat((angles.sin(), angles.cos()), 1) * (0.1 * math.log(FACTOR) + 1)


def _always(value: T, *_: Any, **__: Any) -> T:
    return value
