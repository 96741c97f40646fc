"""How many tokens go through a model at once: the one place that decides it, on a GPU from its free memory.

A GPU is idle while Python prepares the next launch, so small runs go together. A CPU gains nothing from large batches.
"""

import torch
from torch import nn

from headscope.forward.backbone import decoder_layers
from headscope.models.checkpoint import LoadedModel
from headscope.models.device_map import free_bytes

CPU_BATCH_TOKENS, MAX_BATCH_TOKENS = 2048, 2**16
"""Tokens of a batch of runs on a CPU, and most on a GPU."""
CPU_PASS_TOKENS, PASS_TOKENS = 2**14, 2**16
"""Tokens of the longest document that is read in one pass: on a CPU, and on a GPU whatever memory is free there."""
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


def fits_one_pass(model: LoadedModel, tokens: int) -> bool:
    """Whether a text is read in one pass, not in chunks: a short one, or one that fits the free memory of a GPU."""
    if model.device.type != "cuda":
        return tokens <= CPU_PASS_TOKENS
    return tokens <= PASS_TOKENS or tokens * _activation_bytes(model) <= MEMORY_SHARE * _free_gpu_bytes(model)


def _activation_bytes(model: LoadedModel) -> int:
    """Estimated memory of a token in a pass: the outputs of all linear maps of the largest layer, and its stream."""
    widths = [
        sum(module.weight.shape[0] for module in layer.modules() if isinstance(module, nn.Linear))
        for layer in decoder_layers(model)
    ]
    hidden: int = model.module.get_input_embeddings().weight.shape[1]
    bytes_per_number: int = model.module.dtype.itemsize
    return (max(widths, default=0) + 4 * hidden) * bytes_per_number


def _free_gpu_bytes(model: LoadedModel) -> int:
    """Free memory of the fullest GPU of the model, with what torch has reserved and does not use."""
    gpus = {parameter.device for parameter in model.module.parameters()}
    cached = {gpu: torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu) for gpu in gpus}
    return min((free_bytes(gpu) or 0) + cached[gpu] for gpu in gpus)
