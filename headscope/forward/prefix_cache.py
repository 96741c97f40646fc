"""Prefix cache: generate answers to prompts, computing only what a prompt does not share with the previous one.

Keys and values are cached in blocks that start at fixed positions, and each block is computed in one call. So results
for a prompt are bit-identical whatever prompts came before, and wherever a run was resumed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from headscope.attention import backend
from headscope.attention.edits import LayerEdit, knowing_prompt_length
from headscope.attention.listeners import Listener
from headscope.attention.record import AttentionRecord
from headscope.forward.backbone import check_input_ids, refuse_non_finite
from headscope.forward.capture import capturing
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.forward.free_memory import cached_sequences_per_batch
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

TokenIds = npt.NDArray[np.int32]
StepListener = Callable[[Sequence[int], Sequence[AttentionRecord]], None]
"""(numbers of the sequences of a step, their records of one layer)."""

TOKENS_PER_BLOCK = {"cpu": 128, "cuda": 512}
"""Tokens per block. Small blocks share more of a prompt, large ones keep a GPU busy."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """A prompt [L], the largest number of tokens after it, and the test for the token that ends them."""

    prompt: TokenIds
    max_tokens: int
    is_last_token: Callable[[int], bool]


class PrefixCachedGenerator:
    """Greedy generation by one model under its scheme; `processed_tokens` counts the tokens that the model has read.

    It is fastest if prompts with a common prefix follow each other. If the cache is not one key and value per token, as
    in layers without attention, or depends on the total length, `shares_prefixes` is False: the model then reads the
    whole sequence again for every token of the answer.
    """

    def __init__(self, model: Model):
        self.model = model
        self.block_size = TOKENS_PER_BLOCK.get(model.device.type, 128)
        self.shares_prefixes = supports_prefix_cache(model)
        self.processed_tokens = 0
        # Without the config, sliding layers also keep every key, so they can be cropped; the backend applies windows.
        self._cache = DynamicCache()
        self._cached_ids: TokenIds = np.empty(0, np.int32)
        self._edits: list[LayerEdit] = []

    def batch_size(self, tokens: int) -> int:
        """Number of prompts of `tokens` tokens that `generate_batch` should get at once."""
        return cached_sequences_per_batch(self.model, tokens) if self.shares_prefixes else 1

    def generate(
        self, prompt: TokenIds, listener: Listener, max_tokens: int, is_last_token: Callable[[int], bool]
    ) -> list[int]:
        """At most `max_tokens` greedy tokens after `prompt` [L]; ends with the first for which `is_last_token` holds.

        `listener` is called for every layer of the step that produced each token; the step's query is the last one.
        """
        request = GenerationRequest(prompt, max_tokens, is_last_token)
        return self.generate_batch([request], lambda _, records: listener(records[0]))[0]

    def generate_batch(self, requests: Sequence[GenerationRequest], listener: StepListener) -> list[list[int]]:
        """The greedy tokens after every prompt. All prompts have the same length.

        Prompts are read one after another, so that each shares the beginning of the one before; the tokens after the
        first are then generated together. Without shared prefixes, one prompt after another. A sequence that has ended
        goes through the model until all have, and its tokens are dropped. Answers of a batch may differ from those of
        single prompts by rounding.
        """
        answers: list[list[int]] = [[] for _ in requests]
        edits = backend.registered_edits(self.model.attention_modules)
        if edits != self._edits:  # the cached keys are those of other edits
            self._edits, self._cache, self._cached_ids = edits, DynamicCache(), np.empty(0, np.int32)
        with evaluating(self.model), attached(self.model), knowing_prompt_length(len(requests[0].prompt)):
            is_batch = self.shares_prefixes and len(requests) > 1
            caches = []
            for number, request in enumerate(requests):
                rest = request.prompt
                if self.shares_prefixes:
                    with capturing(self.model):
                        rest = self._prefill(request.prompt)
                steps = 1 if is_batch else request.max_tokens
                self._extend([number], requests, answers, rest[None], self._cache, listener, steps)
                caches.append([(layer.keys, layer.values) for layer in self._cache.layers] if is_batch else [])
            if is_batch and not all(map(_has_ended, requests, answers)):
                cache, last = _join(caches), np.array([[answer[-1]] for answer in answers])
                most = max(request.max_tokens for request in requests) - 1
                self._extend([*range(len(requests))], requests, answers, last, cache, listener, most)
        return answers

    def _extend(
        self,
        numbers: Sequence[int],
        requests: Sequence[GenerationRequest],
        answers: Sequence[list[int]],
        ids: npt.NDArray[np.integer],
        cache: DynamicCache,
        listener: StepListener,
        steps: int,
    ) -> None:
        """Add at most `steps` tokens to the answers with these numbers; `ids` [B, n] follow the cached tokens."""
        records: list[AttentionRecord] = []

        def collect(record: AttentionRecord) -> None:
            records.append(record)
            if len(records) == len(numbers):
                listener(numbers, records)
                records.clear()

        with capturing(self.model) as layers:
            layers.listen(collect)
            for _ in range(steps):
                tokens = self._forward(ids, cache).argmax(-1).tolist()
                for number, token in zip(numbers, tokens, strict=True):
                    if not _has_ended(requests[number], answers[number]):
                        answers[number].append(token)
                if all(_has_ended(requests[number], answers[number]) for number in numbers):
                    break
                new = np.array(tokens)[:, None]
                ids = new if self.shares_prefixes else np.append(ids, new, 1)

    def _prefill(self, prompt: TokenIds) -> TokenIds:
        """Cache all blocks of the prompt except the last, and return the last."""
        shared = shared_prefix_length(self._cached_ids, prompt, self.block_size)
        self._cache.crop(shared - self._cache.get_seq_length())
        self._cached_ids = prompt[:shared]  # stays correct if the loop is interrupted
        last = last_block_start(len(prompt), self.block_size)
        for start in range(shared, last, self.block_size):
            self._forward(prompt[None, start : start + self.block_size], self._cache)
        self._cached_ids = prompt[:last]
        return prompt[last:]

    def _forward(self, ids: npt.NDArray[np.integer], cache: DynamicCache) -> Tensor:
        """The model's logits after tokens [B, n] that follow the cached ones, [B, vocabulary]."""
        self.processed_tokens += ids.size
        tensor = torch.from_numpy(ids.astype(np.int64))
        check_input_ids(self.model, tensor, cache.get_seq_length() if self.shares_prefixes else 0)
        tensor = tensor.to(self.model.device)
        caching = {"past_key_values": cache, "use_cache": True} if self.shares_prefixes else {"use_cache": False}
        # If layers share keys, Gemma 4 would crop its mask to the positions in logits_to_keep.
        last = {} if shares_keys_across_layers(self.model) else {"logits_to_keep": 1}
        logits: Tensor = self.model.module(tensor, **last, **caching).logits
        refuse_non_finite(self.model, tensor, logits[:, -1])
        return logits[:, -1]


def _has_ended(request: GenerationRequest, answer: Sequence[int]) -> bool:
    return len(answer) >= request.max_tokens or (len(answer) > 0 and request.is_last_token(answer[-1]))


def _join(caches: list[list[tuple[Tensor | None, Tensor | None]]]) -> DynamicCache:
    """One cache of a batch from the keys and values [1, G, L, d] of every layer of each sequence; empties the lists."""
    joined = DynamicCache()
    for layer in range(len(caches[0])):
        keys, values = zip(*(cache[layer] for cache in caches), strict=True)
        for cache in caches:
            cache[layer] = (None, None)  # a layer at a time, so that memory holds them once
        if keys[0] is not None:
            joined.update(torch.cat(keys), torch.cat(values), layer)
    return joined


def supports_prefix_cache(model: Model) -> bool:
    """Whether the cache of a prefix is valid for every sequence with that prefix."""
    schedule, rotation = model.schedule, model.rotation
    depends_on_length = getattr(schedule, "uses_sequence_length", False) or (
        rotation.frequency_change_length is not None and not schedule.replaces_rotation
    )
    layers = DynamicCache(config=model.module.config).layers
    depends_on_length |= model.padding_check.uncounted_token is not None
    return not depends_on_length and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def last_block_start(length: int, block_size: int) -> int:
    """Start of the last block of a prompt of `length` tokens; the block holds at least one token."""
    return (length - 1) // block_size * block_size


def shared_prefix_length(cached_ids: TokenIds, prompt: TokenIds, block_size: int) -> int:
    """Number of tokens of `prompt` in whole cached blocks. Its last block is never shared."""
    shorter = min(len(cached_ids), last_block_start(len(prompt), block_size))
    differ = np.flatnonzero(cached_ids[:shorter] != prompt[:shorter])
    return (int(differ[0]) if len(differ) else shorter) // block_size * block_size


class FrozenPrefix:
    """A prefix ids [1, n] of texts, under the position scheme and the contexts that are open. Use it inside them.

    `cache` is what a pass over the tokens after it gets; the pass leaves it unchanged, whatever its batch.
    """

    def __init__(self, model: Model, ids: Tensor):
        self.length = ids.shape[1]
        filled = DynamicCache()  # without the config, sliding layers also keep every key
        with torch.no_grad():
            model.module(ids, past_key_values=filled, use_cache=True, logits_to_keep=1)
        self.cache = Cache(layers=[_FrozenLayer(layer.keys, layer.values) for layer in filled.layers])


def shared_prefix(model: Model, first: Tensor, second: Tensor) -> int:
    """Number of first tokens that two texts [1, L] have in common; 0 if the model's cache cannot hold a prefix."""
    shorter = min(first.shape[1], second.shape[1])
    differ = (first[0, :shorter] != second[0, :shorter]).nonzero()
    return (int(differ[0]) if len(differ) else shorter) if supports_prefix_cache(model) else 0


class _FrozenLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [1, G, n, d] of one layer; `update` returns them with further ones and keeps none."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the layer is filled."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the prefix, followed by those of further tokens."""
        keys, values = (
            torch.cat((old.expand(len(new), -1, -1, -1), new), 2)
            for old, new in ((self.keys, key_states), (self.values, value_states))
        )
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2] + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        return -1
