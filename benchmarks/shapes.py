"""Models with random weights of a named shape: what measuring costs on a machine without a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from headscope.base.user_input import quote
from headscope.errors import BadInput
from headscope.models.checkpoint import pick_device
from headscope.positions.model import Model, load

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
}
MAX_CONTEXT = 2**17
"""Native context of the models in tokens."""


def random_model(shape: str, device: str = "auto") -> Model:
    """A Llama of this shape with random weights: bfloat16 on CUDA, otherwise float32."""
    if shape not in SHAPES:
        raise BadInput(f"unknown shape {quote(shape)}. Use one of: {', '.join(SHAPES)}")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=MAX_CONTEXT, rope_parameters=rope)
    place = pick_device(device)
    torch.manual_seed(0)
    with place:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return load(module.eval())


def random_tokens(shape: str, length: int) -> torch.Tensor:
    """Random tokens [length] of the vocabulary of this shape."""
    return torch.randint(3, SHAPES[shape]["vocab_size"] - 1, (length,), generator=torch.Generator().manual_seed(0))
