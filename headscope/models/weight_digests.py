"""Digests of the weights of a loaded model, and a cheap check whether the weights have changed.

Weights are digested as a stream: values are converted and hashed in chunks, tensor by tensor. The digests are kept
until a stamp of the tensors changes. A stamp holds their addresses, the counters by which torch counts writes, and a
sample of their values. It notices optimiser steps, `load_state_dict`, in-place operations, merged LoRAs and replaced
tensors. Writes through `.data` or a numpy view have no counter. They are noticed if a sampled value changes, which is
certain in models of up to `SAMPLED_VALUES` values and practically certain if a whole matrix or the output of a head
changes. A smaller write of that kind, such as one row of a large embedding, may be missed; load the model again.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from headscope.base.model_identity import WeightDigests
from headscope.compat.torch import WRITE_COUNT, non_persistent_buffers, original_module
from headscope.compat.transformer_lens import wrapped_module
from headscope.models import lora, quantization

CHUNK = 2**20
"""Values that are converted and hashed at a time."""
SAMPLED_VALUES = 2**18
"""Values that a stamp reads from all tensors together."""


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by their names without the wrappers that `plain_modules` leaves out."""
    for prefix, part in plain_modules(module):
        skipped = non_persistent_buffers(part)
        tensors = (part.named_parameters, part.named_buffers)
        for name, tensor in chain(*(named(recurse=False, remove_duplicate=False) for named in tensors)):
            if name in skipped:
                continue
            # TransformerLens gives linear layers without a bias a buffer of zeros.
            if isinstance(tensor, nn.Parameter) or not (isinstance(part, nn.Linear) and not tensor.any()):
                yield prefix + name, tensor


def plain_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules with the prefix of their tensors' names, without the wrappers of TransformerLens, peft, torch.compile."""
    module = original_module(module)
    if (wrapped := wrapped_module(module)) is not None:
        yield from plain_modules(wrapped, prefix)
        return
    if not type(module).__module__.startswith("transformer_lens."):
        yield prefix, module
    for name, child in module.named_children():
        if not name.startswith("lora_"):
            yield from plain_modules(child, prefix if name == "base_layer" else f"{prefix}{name}.")


class WeightTracker:
    """The digests of a module's weights, computed on demand and again whenever the weights have changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stamp: Any = None
        self._digests = WeightDigests()

    def digests(self) -> WeightDigests:
        """The digests of the present weights."""
        stamp = weights_stamp(self._module)
        if stamp != self._stamp:
            self._digests, self._stamp = digest_weights(self._module), stamp
        return self._digests

    def keep_digests(self) -> None:
        """Keep the digests although the tensors look changed: a pass packs quantised weights in place."""
        self._stamp = weights_stamp(self._module)


def weights_stamp(module: nn.Module) -> tuple[Any, ...]:
    """A value that changes with the weights: address, write count, shape of each tensor, digest of sampled values."""
    tensors = [*named_tensors(module), *lora.active_lora_tensors(module)]
    step = sum(tensor.numel() for _, tensor in tensors) // SAMPLED_VALUES
    samples: dict[torch.device, list[Tensor]] = {}
    for _, tensor in tensors:
        if tensor.numel():
            samples.setdefault(tensor.device, []).append(_sample(tensor.detach(), step))
    digest = hashlib.sha256()
    for values in samples.values():
        digest.update(_as_bytes(torch.cat(values)))
    facts = ((name, tensor.data_ptr(), WRITE_COUNT.of(tensor), tuple(tensor.shape)) for name, tensor in tensors)
    return *facts, digest.digest()


def _sample(tensor: Tensor, step: int) -> Tensor:
    """The bytes of every `step`-th value, or of 64 of a small tensor. The values lie in all columns of a matrix."""
    flat = tensor.reshape(-1)
    step = max(1, min(step, len(flat) // 64))
    while gcd(step, tensor.shape[-1] if tensor.dim() else 1) > 1:
        step += 1
    return flat[::step].contiguous().view(torch.uint8)


def digest_weights(module: nn.Module) -> WeightDigests:
    """SHA-256 of all weights by name, equal for a GGUF file, a folder and a model in memory of one checkpoint.

    Tied weights count once. Values are digested exactly (as the smallest of bfloat16, float32 and float64 that holds
    all values of a chunk, so that the model's dtype does not matter), rounded to bfloat16 and rounded to float16.
    Persistent buffers, such as the biases of a router, are part of the exact digest and of that in float16 only: runs
    of earlier versions hold the digest in bfloat16 without them.
    """
    names: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named_tensors(module):
        names.setdefault(id(tensor), (name, tensor))
    hashers = {name: hashlib.sha256() for name in ("bfloat16", "float16", "exact")}
    with ThreadPoolExecutor(len(hashers)) as pool:  # hashing a large buffer does not hold the interpreter
        for name, tensor in sorted(names.values(), key=lambda item: item[0]):
            header = f"{name} {tuple(tensor.shape)}\n".encode()
            kinds = [kind for kind in hashers if isinstance(tensor, nn.Parameter) or kind != "bfloat16"]
            for kind in kinds:
                hashers[kind].update(header)
            flat = tensor.detach().reshape(-1)
            for chunk in torch.split(flat, CHUNK):
                [*pool.map(lambda kind: hashers[kind].update(_as_bytes(CONVERSIONS[kind](chunk))), kinds)]  # noqa: B023
    extra = lora.active_lora_digest(module) + quantization.quantized_state_digest(module)
    for hasher in hashers.values():
        hasher.update(extra)
    return WeightDigests(**{name: hasher.hexdigest() for name, hasher in hashers.items()})


def _exact(values: Tensor) -> Tensor:
    """The values in the smallest of bfloat16, float32 and float64 that holds them all; other numbers as they are."""
    if not values.is_floating_point() or values.dtype == torch.bfloat16:
        return values
    for dtype in (torch.bfloat16, torch.float32):
        few, all_values = values[:64], values
        if all(torch.equal(part.to(dtype).to(values.dtype), part) for part in (few, all_values)):
            return values.to(dtype)
    return values


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda values: values.bfloat16(),
    "float16": lambda values: values.half() if values.is_floating_point() else values,
    "exact": _exact,
}


def _as_bytes(values: Tensor) -> Any:
    return values.cpu().contiguous().view(torch.uint8).numpy().data
