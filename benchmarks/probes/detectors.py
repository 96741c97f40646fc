"""Cost of the head detectors."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.positions.model import Model
from probes.detectors.run import repeated_random_tokens, sequence_scores


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The detectors on one sequence of about `length` tokens, and plain forward passes."""
    period = length // 2
    token_ids, opening_length = repeated_random_tokens(model.tokenizer, period, (0,))
    ids = torch.from_numpy(token_ids)

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    return {
        "detectors: plain forward with logits": lambda: plain(model.module),
        "detectors: plain forward without logits": lambda: plain(model.module.base_model),
        "detectors": lambda: sequence_scores(model, ids[None], opening_length, period)[0],
    }
