"""What the detectors cost: a forward pass with logits, and one without that they listen to."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.positions.model import Model
from probes.detectors.run import detector_scores, repeated_random_tokens


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """One sequence of about `length` tokens."""
    period = length // 2
    numbers, opening = repeated_random_tokens(model.tokenizer, period, (0,))
    ids = torch.from_numpy(numbers)

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    return {
        "detectors: plain forward with logits": lambda: plain(model.module),
        "detectors: plain forward without logits": lambda: plain(model.module.base_model),
        "detectors": lambda: detector_scores(model, ids, opening, period),
    }
