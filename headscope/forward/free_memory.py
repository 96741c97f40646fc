"""How many tokens go through a model at once: the one place that decides it, on a GPU from its free memory.

A GPU is idle while Python prepares the next launch, so small runs go together. A CPU gains little from more than 2,048
tokens at once.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from headscope.forward.backbone import decoder_layers
from headscope.models.checkpoint import LoadedModel
from headscope.models.device_map import free_bytes

T = TypeVar("T")

CPU_BATCH_TOKENS, MAX_BATCH_TOKENS = 2048, 2**16
"""Tokens of a batch of runs on a CPU, and most on a GPU."""
CPU_PASS_TOKENS, PASS_TOKENS = 2**14, 2**16
"""Tokens of the longest document that is read in one pass: on a CPU, and on a GPU whatever memory is free there."""
CPU_CHUNK_TOKENS = 2**10
"""Tokens of a chunk of a longer document on a CPU, and fewest on a GPU."""
MAX_BATCH_SEQUENCES = 32
"""Most answers that are generated together: each step of a layer takes few launches more than that of one."""
MEMORY_SHARE = 0.5
"""Share of the free memory that the estimated activations may take."""
FLOAT32_BYTES = 4


def runs_per_batch(model: LoadedModel, tokens: int) -> int:
    """Number of runs of a text of `tokens` tokens that are computed as one batch, with logits of every token."""
    if model.device.type != "cuda":
        return max(1, CPU_BATCH_TOKENS // tokens)
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    per_token = _activation_bytes(model) + vocabulary * (model.module.dtype.itemsize + 2 * FLOAT32_BYTES)
    return max(1, min(MAX_BATCH_TOKENS, int(MEMORY_SHARE * _free_gpu_bytes(model) / per_token)) // tokens)


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in order, at most `size` at a time."""
    return (items[first : first + size] for first in range(0, len(items), size))


def texts_per_batch(model: LoadedModel, tokens: int) -> int:
    """Number of texts of `tokens` tokens that are measured in one pass. On a CPU one, as for answers."""
    return runs_per_batch(model, tokens) if model.device.type == "cuda" else 1


def cached_sequences_per_batch(model: LoadedModel, tokens: int) -> int:
    """Number of texts of `tokens` tokens whose keys and values are in memory at once while answers are generated.

    On a CPU one, so that answers do not depend on the texts beside them.
    """
    if model.device.type != "cuda":
        return 1
    geometry, copies = model.geometry, 3  # of each sequence, joined, and longer by a token
    by_layer = [
        2 * groups * dim for groups, dim in zip(geometry.layer_kv_groups, geometry.layer_head_dims, strict=True)
    ]
    per_token = copies * sum(by_layer) * model.module.dtype.itemsize + max(by_layer) * FLOAT32_BYTES
    return max(1, min(MAX_BATCH_SEQUENCES, int(MEMORY_SHARE * _free_gpu_bytes(model) / per_token) // tokens))


def fits_one_pass(model: LoadedModel, tokens: int) -> bool:
    """Whether a text is read in one pass, not in chunks: a short one, or one that fits the memory of a GPU.

    The memory counts that other processes use, too: numbers must not depend on them.
    """
    if model.device.type != "cuda":
        return tokens <= CPU_PASS_TOKENS
    return tokens <= PASS_TOKENS or tokens * _activation_bytes(model) <= MEMORY_SHARE * _gpu_bytes_beside_weights(model)


def tokens_per_chunk(model: LoadedModel) -> int:
    """Tokens of a chunk of a document that does not fit one pass: on a GPU the largest power of two that fits there."""
    if model.device.type != "cuda":
        return CPU_CHUNK_TOKENS
    fitting = MEMORY_SHARE * _gpu_bytes_beside_weights(model) / _activation_bytes(model)
    return int(2 ** max(math.floor(math.log2(max(fitting, 1))), math.log2(CPU_CHUNK_TOKENS)))


def _activation_bytes(model: LoadedModel) -> int:
    """Estimated memory of a token in a pass: the outputs of all linear maps of the largest layer, and its stream."""
    experts = getattr(model.module.config, "num_experts_per_tok", None) or 1
    widths = [sum(_output_width(module, experts) for module in layer.modules()) for layer in decoder_layers(model)]
    hidden: int = model.module.get_input_embeddings().weight.shape[1]
    bytes_per_number: int = model.module.dtype.itemsize
    return (max(widths, default=0) + 4 * hidden) * bytes_per_number


def _output_width(module: nn.Module, experts_per_token: int) -> int:
    """Numbers per token that a linear map gives, or the experts of a token, whose weights are stacked; 0 for others."""
    if isinstance(module, nn.Linear):
        return module.out_features  # a weight of 4 bits has another shape
    if isinstance(module, Conv1D):
        return int(module.nf)
    return experts_per_token * sum(weight.shape[1] for weight in module.parameters(recurse=False) if weight.ndim == 3)


def _gpu_bytes_beside_weights(model: LoadedModel) -> int:
    """Memory of the fullest GPU of the model without the model's weights."""
    weights: Counter[torch.device] = Counter()
    for parameter in model.module.parameters():
        weights[parameter.device] += parameter.nbytes
    return min(torch.cuda.get_device_properties(gpu).total_memory - used for gpu, used in weights.items())


def _free_gpu_bytes(model: LoadedModel) -> int:
    """Free memory of the fullest GPU of the model, with what torch has reserved and does not use."""
    gpus = {parameter.device for parameter in model.module.parameters()}
    cached = {gpu: torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu) for gpu in gpus}
    return min((free_bytes(gpu) or 0) + cached[gpu] for gpu in gpus)
