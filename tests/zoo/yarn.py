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
                setattr(rotary, factor, rotary_factor(rope))
                stack.callback(setattr, rotary, name, inv_freq)
                stack.callback(setattr, rotary, factor, before)
                if hasattr(rotary, "rope_init_fn"):  # called in every pass by some
                    edited = getattr(rotary, name), getattr(rotary, factor)
                    stack.callback(setattr, rotary, "rope_init_fn", rotary.rope_init_fn)
                    rotary.rope_init_fn = partial(_always, edited)
            if hasattr(rotary, "kv_lora_rank") and isinstance(getattr(rotary, "scaling", None), float):
                stack.callback(setattr, rotary, "scaling", rotary.scaling)
                rotary.scaling *= softmax_ratio(getattr(rotary.config, "rope_parameters", None) or {})
        yield


def temperature(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def rotary_factor(rope: dict[str, Any]) -> float:
    """YaRN's factor on cos and sin. A family with YaRN keeps its `mscale`."""
    if rope.get("rope_type") == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(FACTOR, rope["mscale"]) / temperature(FACTOR, rope["mscale_all_dim"])
    return temperature(FACTOR)


def softmax_ratio(rope: dict[str, Any]) -> float:
    """What latent attention with YaRN multiplies its softmax scale by, relative to its own factor."""
    every = rope.get("mscale_all_dim")
    if rope.get("rope_type") != "yarn" or not every:
        return 1.0
    return (temperature(FACTOR, every) / temperature(rope["factor"], every)) ** 2


def yarn_frequencies(inv_freq: Tensor, rope: dict[str, Any], native: int) -> Tensor:
    """YaRN's frequencies [P] in place of base^(-f/P): divided by the factor where wavelengths are long."""
    pairs = len(inv_freq)
    base = rope.get("rope_theta") or float(inv_freq[0] / inv_freq[1]) ** pairs
    kind = rope.get("rope_type", "default")
    native = rope.get("original_max_position_embeddings", native / rope["factor"] if kind == "linear" else native)
    ramp = rope if kind == "yarn" else {}
    plain = base ** (-torch.arange(pairs) / pairs) * (inv_freq != 0)  # a proportional rope turns only some pairs

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(native / (times * 2 * math.pi)) / math.log(base)

    low, high = pair_that_turns(ramp.get("beta_fast") or 32), pair_that_turns(ramp.get("beta_slow") or 1)
    if ramp.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    share = ((torch.arange(pairs) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / FACTOR * share + plain * (1 - share)


def yarn_table(table: Tensor, native: int) -> Tensor:
    """A table of sin and cos by position [L, 2P] with base 10,000, as GPT-J has it, under YaRN."""
    plain = 10_000.0 ** (-torch.arange(table.shape[1] // 2) / (table.shape[1] // 2))
    angles = torch.arange(len(table))[:, None] * yarn_frequencies(plain, {"rope_theta": 10_000.0}, native)
    return torch.cat((angles.sin(), angles.cos()), 1) * temperature(FACTOR)


def _always(value: T, *_: Any, **__: Any) -> T:
    return value
